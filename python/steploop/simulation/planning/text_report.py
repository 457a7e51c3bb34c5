"""The report of a plan for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from steploop.loadtest.text_report import print_workload
from steploop.memory import format_bytes
from steploop.reporting import say
from steploop.simulation.planning.breaking import (
    COMPUTE,
    KV_CACHE,
    SLOTS,
    STATIC_BATCH,
    STEP_TIME,
    TOKEN_BUDGET,
    Breaking,
)
from steploop.simulation.planning.limits import MOST_TIMES
from steploop.simulation.planning.search import Plan
from steploop.simulation.planning.trials import Layout, Objective, Trial
from steploop.simulation.settings import Settings
from steploop.simulation.text_report import print_settings

_CAUSES = {
    KV_CACHE: "the KV cache is full; twice as much of it helps",
    SLOTS: "all slots are taken; twice max_num_seqs helps",
    TOKEN_BUDGET: "prompts wait for their turn in steps; twice max_num_batched_tokens helps",
    COMPUTE: "prompts come faster than steps take them; more replicas or a higher degree help, not more slots, tokens "
    "or KV cache",
    STEP_TIME: "steps take too long; more replicas or a higher degree help, not more slots, tokens or KV cache",
    STATIC_BATCH: "requests wait for whole batches to end; another --scheduling-policy helps",
}


def print_plan(console: Console, found: Plan, settings: Settings) -> None:
    """All of it. `settings` are those that the plan was asked for with."""
    print_settings(console, found.settings or settings)
    print_workload(console, found.workload)
    say(console, f"\nwanted: {found.rate:g} requests/s, {_wanted(found.objective)}")
    _print_degrees(console, found)
    if found.trials:
        console.print(_layout_table(found))
    if found.chosen is None:
        say(console, f"no plan: {found.reason}", style="bold")
        if found.breaking is not None:
            _print_breaking(console, found.breaking, found.objective)
        return
    _print_chosen(console, found, found.chosen)


def _print_degrees(console: Console, found: Plan) -> None:
    """Those that come to nothing, and why."""
    unfit = [degree for degree in found.degrees if degree.problem is not None]
    if unfit and found.reason != unfit[-1].problem:
        names = ", ".join(str(degree.tensor_parallel_size) for degree in unfit)
        say(console, f"tensor_parallel_size {names}: no; {unfit[-1].problem}")
    for degree in found.degrees:
        if degree.alone is not None and not degree.possible:
            shares = ", ".join(f"{share:.1%} within {name}" for name, share in degree.alone.items())
            say(
                console,
                f"tensor_parallel_size {degree.tensor_parallel_size}: too slow even where each request is alone: "
                f"{shares}",
            )


def _print_chosen(console: Console, found: Plan, chosen: Trial) -> None:
    layout, limits = chosen.layout, chosen.limits
    say(
        console,
        f"plan: {_count(layout.num_devices, 'device')}: {_count(layout.num_replicas, 'replica')} with "
        f"tensor_parallel_size {layout.tensor_parallel_size}, max_num_seqs {limits.max_num_seqs}, "
        f"max_num_batched_tokens {limits.max_num_batched_tokens}",
        style="bold",
    )
    budget = found.kv_budget
    if budget is not None:
        say(
            console,
            f"KV cache: {format_bytes(budget.available_bytes)} on each device, {chosen.kv_use:.1%} of it used; "
            f"{format_bytes(budget.memory_bytes)} would do (kv_cache_memory_bytes={budget.memory_bytes})",
        )
    if len(found.limits) > 1:
        steps = ", ".join(
            f"{step.limits.max_num_seqs} / {step.limits.max_num_batched_tokens}: {step.rate:.3g}/s"
            for step in found.limits
        )
        say(console, f"limits tried, with the rate that they bear: {steps}")
    if found.breaking is None:
        say(console, f"nothing breaks up to {MOST_TIMES} times the rate")
        return
    say(console, f"headroom: {found.headroom:.0%}, up to {found.limits[-1].rate:.4g} requests/s; what breaks first:")
    _print_breaking(console, found.breaking, found.objective)


def _print_breaking(console: Console, breaking: Breaking, objective: Objective) -> None:
    trial, figures = breaking.trial, breaking.figures
    shares = ", ".join(
        f"{share:.1%} within {name} {objective.slo[name]:g} s" for name, share in trial.share_within.items()
    )
    if trial.backlog_growth > trial.most_backlog_growth:
        shares += f"; {trial.backlog_growth:.1%} of what comes is not served"
    say(console, f"  {breaking.first}: at {trial.rate:.4g} requests/s {shares}")
    say(console, f"  {breaking.cause}: {_CAUSES[breaking.cause]}")
    say(
        console,
        f"  while requests wait: {figures['share_of_slots']:.0%} of the slots, {figures['share_of_tokens']:.0%} of "
        f"max_num_batched_tokens, {figures['kv_use']:.0%} of the KV cache; "
        f"steps of {figures['step_duration'] * 1e3:.3g} ms with {figures['sequences_in_step']:.1f} sequences, "
        f"at most {figures['longest_step'] * 1e3:.3g} ms; busy {figures['share_of_time_busy']:.0%} of the time, "
        f"{figures['share_preempted']:.1%} of the requests preempted",
    )


def _layout_table(found: Plan) -> Table:
    """A line for each layout, with the limits that came furthest."""
    table = Table(title="Layouts tried, each with its best limits; p99 in ms, of itl: of a request's longest wait")
    names = list(found.objective.slo)
    titles = ["degree", "replicas", "devices", "seqs", "tokens", "within", *names, "backlog", "slots", "KV", ""]
    for title in titles:
        table.add_column(title, justify="right")
    for trial in best_by_layout(found):
        p99 = [trial.p99[name] for name in names]
        table.add_row(
            str(trial.layout.tensor_parallel_size),
            str(trial.layout.num_replicas),
            str(trial.layout.num_devices),
            str(trial.limits.max_num_seqs),
            str(trial.limits.max_num_batched_tokens),
            f"{trial.attainment:.1%}",
            *("-" if value is None else f"{value * 1e3:.4g}" if value < 10 else f"{value * 1e3:.0f}" for value in p99),
            f"{max(trial.backlog_growth, 0):.1%}",
            f"{trial.share_of_slots:.0%}",
            f"{trial.kv_use:.0%}",
            "meets it" if trial.good else "",
        )
    return table


def best_by_layout(found: Plan) -> list[Trial]:
    """Of the trials at the rate of the plan and with all of the memory, in the order of the devices."""
    best: dict[Layout, Trial] = {}
    full = {trial.layout: trial.num_kv_blocks for trial in reversed(found.trials)}  # of the first
    for trial in found.trials:
        if trial.rate == found.rate and trial.num_kv_blocks == full[trial.layout]:
            best[trial.layout] = max(trial, best.get(trial.layout, trial), key=_goodness)
    return sorted(best.values(), key=lambda trial: (trial.layout.num_devices, trial.layout.tensor_parallel_size))


def _goodness(trial: Trial) -> tuple[bool, float, float]:
    return trial.good, trial.attainment, -trial.pressure


def _wanted(objective: Objective) -> str:
    limits = ", ".join(f"{name} {limit:g} s" for name, limit in objective.slo.items())
    return f"{objective.attainment * 100:g}% of them within {limits}"


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
