"""Sums up the runs of prefix_caching.py and says it in words."""

from __future__ import annotations

from typing import Any

from machine import QUIET_CORES
from report import spread

Run = dict[str, Any]


def summarise_shared(runs: list[Run]) -> dict[str, Any]:
    """Both ways' times as [median, min, max] over quiet runs, their ratios, and whether the answers are the same."""
    on, off = (_quiet(runs, caching) for caching in (True, False))
    summary = {
        name: {
            key: spread([run[key] for run in own])
            for key in ("first_tokens_s", "prompt_steps_s", "duration", "hit_tokens", "context_tokens")
        }
        for name, own in (("caching", on), ("no_caching", off))
    }
    return {
        **summary,
        "num_prompt_tokens": runs[0]["num_prompt_tokens"],
        "num_quiet_runs": sum(run["quiet"] for run in runs),
        "first_tokens_ratio": summary["no_caching"]["first_tokens_s"][0] / summary["caching"]["first_tokens_s"][0],
        "prompt_steps_ratio": summary["no_caching"]["prompt_steps_s"][0] / summary["caching"]["prompt_steps_s"][0],
        "answers_equal": all(run["answers"] == runs[0]["answers"] for run in runs),
    }


def summarise_overhead(runs: list[Run]) -> dict[str, Any]:
    """Both ways' step times as [median, min, max] over quiet runs, and what caching adds, as a share of a step."""
    on, off = (_quiet(runs, caching) for caching in (True, False))
    summary = {
        name: {
            key: spread([run[key] for run in own])
            for key in ("step_ms", "schedule_us", "update_us", "beside_model_us", "hit_tokens")
        }
        for name, own in (("caching", on), ("no_caching", off))
    }
    added_us = summary["caching"]["beside_model_us"][0] - summary["no_caching"]["beside_model_us"][0]
    step_us = summary["no_caching"]["step_ms"][0] * 1e3
    return {
        **summary,
        "num_quiet_runs": sum(run["quiet"] for run in runs),
        "added_us": added_us,
        "added_share": added_us / step_us,
        "step_time_change": summary["caching"]["step_ms"][0] * 1e3 / step_us - 1,
        "answers_equal": all(run["answers"] == runs[0]["answers"] for run in runs),
    }


def format_report(result: dict[str, Any]) -> str:
    """What a person reads."""
    machine, settings = result["machine"], result["settings"]
    shared, samples, overhead = result["shared"], result["samples"], result["overhead"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {settings['model']}, "
        f"{settings['dtype']}; median [min-max]",
        "",
        f"{settings['num_requests']} prompts that share {settings['prefix_tokens']} tokens, "
        f"{shared['num_prompt_tokens']} tokens in all:",
    ]
    for name, label in (("caching", "prefix caching"), ("no_caching", "without")):
        own = shared[name]
        lines.append(
            f"  {label:16}all first tokens after {_cell(own['first_tokens_s'], '.2f')} s, steps with prompts "
            f"{_cell(own['prompt_steps_s'], '.2f')} s; {own['context_tokens'][0]:.0f} prompt tokens computed"
        )
    lines += [
        f"  {shared['first_tokens_ratio']:.1f}x sooner, {shared['prompt_steps_ratio']:.1f}x less time on prompts",
        f"  tokens and log-probabilities: {_sameness(shared)}",
        "",
        f"n={samples['num_samples']} of a prompt of {samples['prompt_blocks']} blocks: at the peak "
        f"{samples['peak_blocks']} KV blocks; as requests of their own: {samples['peak_blocks_of_requests']}",
        "",
        "Nothing to find:",
    ]
    for name, label in (("caching", "prefix caching"), ("no_caching", "without")):
        own = overhead[name]
        lines.append(
            f"  {label:16}a step {_cell(own['step_ms'], '.2f')} ms, of it all but the model "
            f"{_cell(own['beside_model_us'], '.1f')} µs (schedule {_cell(own['schedule_us'], '.1f')}, update "
            f"{_cell(own['update_us'], '.1f')}); {own['hit_tokens'][0]:.0f} tokens found"
        )
    lines.append(
        f"  caching adds {overhead['added_us']:.1f} µs, {overhead['added_share']:.3%} of a step; tokens: "
        f"{_sameness(overhead)}"
    )
    num_runs, num_quiet = len(result["runs"]), shared["num_quiet_runs"] + overhead["num_quiet_runs"]
    lines += [
        "",
        f"{num_quiet} of {num_runs} runs were quiet (others below {QUIET_CORES} cores); only those count where any.",
    ]
    return "\n".join(lines)


def _quiet(runs: list[Run], caching: bool) -> list[Run]:
    """The quiet ones of them; all where none was."""
    own = [run for run in runs if run["caching"] == caching]
    return [run for run in own if run["quiet"]] or own


def _sameness(summary: dict[str, Any]) -> str:
    return "the same bits" if summary["answers_equal"] else "NOT the same"


def _cell(figure: list[float], show: str) -> str:
    middle, low, high = (format(value, show) for value in figure)
    return f"{middle} [{low}-{high}]"
