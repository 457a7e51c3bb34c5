"""The arguments of `steploop simulate`, `plan` and `calibrate`. Imports nothing that takes time."""

from __future__ import annotations

import argparse

from steploop.engine_arguments import (
    MODEL_HELP,
    add_full_engine_options,
    add_scheduling_options,
)
from steploop.workload.arguments import add_workload_arguments

SIMULATED_MODEL_HELP = "opt-13b, llama-3-8b, llama-3-70b, gpt3-175b, or a model folder, a config.json or a GGUF file"

SIMULATE_DESCRIPTION = """Serves a drawn workload with the scheduler and the block manager of the engine, on a virtual
clock: a step takes what the cost model says of its tokens, on a device that need not be here. Reports what a load test
would: throughput, latencies, occupancy of the batch, use of the KV cache, preemptions."""

SIMULATE_EPILOG = """Requests end where they were drawn, and ask for --max-tokens. Latencies are counted from arrival;
the next step begins as the one before it ends. The cost model's factors are assumptions for the presets, printed with
the report, and measurements for this-machine and for a file that `steploop calibrate` wrote."""

PLAN_DESCRIPTION = """Searches for the fewest devices with which MODEL meets an SLO at a rate of arrivals: over
tensor-parallel degrees and numbers of replicas, then over the limits of a step and the size of the KV cache, with a
simulation for each. Then says how far the load may grow, and what breaks first."""

PLAN_EPILOG = """A layout is good if --attainment of all requests, and of the later half of them, are within every
limit, and the backlog does not grow by more than 2% of what comes (and what chance explains), so that no workload is
too short to show a system that does not keep up. Nothing is left out as a warm-up. The exit status is 1 if no layout is
good. Factors are those of `steploop simulate`: assumptions for the presets, printed with the report, and measurements
for this-machine and FILE.json."""

CALIBRATE_DESCRIPTION = """Runs MODEL here on a grid of batch sizes, prompt lengths and context lengths, for a minute or
two, fits the simulator's cost model to how long steps took, and writes it to FILE for `steploop simulate --device`."""


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all of `steploop simulate`."""
    parser.description, parser.epilog = SIMULATE_DESCRIPTION, SIMULATE_EPILOG
    parser.add_argument("model", metavar="MODEL", help=SIMULATED_MODEL_HELP)
    num_before = len(parser._actions)
    device = _add_device(parser)
    device.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="devices that share a model (default 1)"
    )
    device.add_argument("--num-replicas", type=int, default=1, metavar="N", help="engines side by side (default 1)")
    engine = _add_engine(parser)
    engine.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="sequences in a step (default 64)")
    engine.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, metavar="N", help="tokens in a step (default 2048)"
    )
    add_scheduling_options(parser.add_argument_group("scheduling", "See EngineConfig for what each choice means."))
    add_workload_arguments(
        parser.add_argument_group("workload", "What is drawn is the same for the same --seed."), with_sweep=False
    )
    # What a sweep may vary: by name, how it is read and what it may be.
    parser.set_defaults(
        # Flags have no values.
        sweepable={
            action.dest: (action.type or str, action.choices)
            for action in parser._actions[num_before:]
            if action.nargs != 0
        }
    )
    report = parser.add_argument_group("report")
    _add_slo(report)
    report.add_argument(
        "--sweep",
        metavar="NAME=VALUES",
        help="one simulation for each value of an option: rate=1..64 (doubling), max-num-seqs=8,16,32, "
        "scheduling-policy=static,on_demand, rate=1..10:1 (steps of 1)",
    )
    _add_json(report)
    report.add_argument(
        "--plot",
        metavar="FILE",
        help="draw slots of the batch, KV use and latencies into a .svg, .png or .html FILE (needs matplotlib)",
    )


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all of `steploop plan`."""
    parser.description, parser.epilog = PLAN_DESCRIPTION, PLAN_EPILOG
    parser.add_argument("model", metavar="MODEL", help=SIMULATED_MODEL_HELP)
    objective = parser.add_argument_group("objective")
    objective.add_argument(
        "--rate",
        type=float,
        required=True,
        metavar="RATE",
        help="requests a second, or conversations with --turns; instead of a rate in --arrivals or of what is recorded",
    )
    _add_slo(objective, required=True)
    objective.add_argument(
        "--attainment",
        type=float,
        default=0.99,
        metavar="SHARE",
        help="of the requests that must be good (default 0.99)",
    )
    objective.add_argument("--max-devices", type=int, default=64, metavar="N", help="at most so many (default 64)")
    device = _add_device(parser)
    device.add_argument(
        "--tensor-parallel-size", type=int, metavar="N", help="devices that share a model (default: searched for)"
    )
    engine = _add_engine(parser)
    engine.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences in a step (default: searched for)")
    engine.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="tokens in a step (default: searched for)"
    )
    add_scheduling_options(parser.add_argument_group("scheduling", "See EngineConfig for what each choice means."))
    add_workload_arguments(
        parser.add_argument_group("workload", "What is drawn is the same for the same --seed."),
        with_sweep=False,
        num_requests="those of 300 s, but 2000 to 20000",
        arrivals="poisson",
    )
    _add_json(parser.add_argument_group("report"))


def _add_device(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    device = parser.add_argument_group("device")
    device.add_argument(
        "--device",
        default="A100-80GB",
        metavar="NAME",
        help="A100-40GB, A100-80GB, H100, H200, L4; this-machine: measured first, with MODEL loaded; or a file that "
        "`steploop calibrate` wrote (default A100-80GB)",
    )
    device.add_argument(
        "--routing",
        default="least_outstanding",
        choices=["round_robin", "least_outstanding", "prefix_affine"],
        help="which replica gets a request: in turns; the one with the fewest tokens to serve; or the same, less what "
        "its prefix cache has of the prompt (default least_outstanding)",
    )
    device.add_argument(
        "--dtype",
        metavar="NAME",
        help="of weights: bfloat16, float16, float32, fp8, int8, int4 (default bfloat16, or what was calibrated)",
    )
    device.add_argument(
        "--kv-cache-dtype",
        metavar="NAME",
        help="bfloat16, float16, float32, fp8 or int8 (default bfloat16, or what was calibrated)",
    )
    device.add_argument(
        "--efficiency",
        metavar="NAME=VALUE,...",
        help="other factors of the cost model, such as compute_efficiency=0.5,step_us=2000; the report has all",
    )
    return device


def _add_engine(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    engine = parser.add_argument_group("engine", "See EngineConfig for what each means.")
    engine.add_argument("--max-model-len", type=int, metavar="N", help="longest sequence (default: the model's)")
    engine.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens in a KV block (default 16)")
    engine.add_argument(
        "--kv-cache-memory-bytes",
        type=int,
        metavar="N",
        help="KV cache of each device (default: what --gpu-memory-utilization leaves beside the weights)",
    )
    engine.add_argument("--num-kv-blocks", type=int, metavar="N", help="the same in blocks, whatever the memory")
    engine.add_argument(
        "--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE", help="of a device's memory (default 0.9)"
    )
    engine.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt whole")
    engine.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="what each request asks for, which the policies reserve and static keep blocks for (default: the longest "
        "output drawn)",
    )
    return engine


def _add_json(group: argparse._ActionsContainer) -> None:
    group.add_argument("--json", metavar="FILE", help="write all figures into FILE; -: standard output")


def _add_slo(group: argparse._ActionsContainer, *, required: bool = False) -> None:
    """--slo."""
    group.add_argument(
        "--slo",
        metavar="LIMITS",
        required=required,
        help="such as ttft=0.5,itl=0.05,tpot=0.04,e2e=10, in seconds: a request is good if it is within all of them. "
        "ttft: to the first token; itl: the longest wait between two; tpot: the mean for each; e2e: to the end",
    )


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all of `steploop calibrate`."""
    parser.description = CALIBRATE_DESCRIPTION
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("output", metavar="FILE", help="the JSON file to write")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each; medians count (default 3)")
    add_full_engine_options(parser)
