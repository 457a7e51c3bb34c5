"""Servers under the same load, in turns in one run: `steploop serve` and llama.cpp's, and steploop's engine in process.

python bench/peers/servers.py                       # half an hour; JSON into bench/results, a table to stdout
python bench/peers/servers.py --targets "in process,serve" --loads "32 streams" --rounds 5

The load comes from `steploop bench`. Server, client and engine share the machine's cores. A target that fails is
reported in table and file, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench" / "engine"))

from catalog import LLAMA_CPP  # noqa: E402
from install import CommandError, Installer  # noqa: E402
from llama_server_worker import free_port, server_options  # noqa: E402
from machine import describe_machine  # noqa: E402
from script import RESULTS, positive, say, write_json  # noqa: E402

import steploop  # noqa: E402
from steploop.demo.model import find_demo_model  # noqa: E402

TARGETS = ("in process", "serve", "in process int4", "serve int4", "llama.cpp Q4_0")
RATIOS = (("serve", "in process"), ("serve int4", "in process int4"), ("serve int4", "llama.cpp Q4_0"))
"""Of which throughput to which, round by round, under the load that leaves no engine without work."""
SATURATING = "32 streams"
LOADS = {
    SATURATING: ("--max-concurrency", "32"),
    "2 requests/s": ("--arrivals", "poisson:2"),
}
LENGTHS = ("--prompt-lengths", "uniform:32:256", "--output-lengths", "exponential:96:384:clip")
MAX_MODEL_LEN, NUM_SLOTS, MAX_BATCHED_TOKENS = 1024, 32, 2048
START_TIMEOUT_S = 120

Run = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes JSON, returns the exit code."""
    args = _parse(argv)
    runs: list[Run] = []
    installer = Installer(args.folder, args.model)
    for round_number in range(args.rounds):
        for load in args.loads:
            for target in args.targets:
                try:
                    figures = _figures(_measure(target, load, args, installer))
                except (CommandError, OSError, RuntimeError, subprocess.CalledProcessError) as error:
                    figures = {"error": str(error)}
                runs.append({"target": target, "load": load, "round": round_number, **figures})
                say(f"{load}, {target}: {figures.get('output_tokens_per_second', figures.get('error'))}")
    result = {
        "machine": describe_machine(),
        "versions": {"steploop": steploop.__version__, "llama.cpp": LLAMA_CPP},
        "settings": {
            "model": args.model.name,
            "num_threads": args.threads,
            "num_requests": args.num_requests,
            "max_num_seqs": NUM_SLOTS,
            "lengths": " ".join(LENGTHS),
            "loads": {name: " ".join(LOADS[name]) for name in args.loads},
        },
        "summary": summarise(runs),
        "runs": runs,
    }
    write_json(args.output, result)
    print(format_report(result))
    return int(any("error" in run for run in runs))


def summarise(runs: list[Run]) -> dict[str, Any]:
    """By load: medians of each target's figures, and of the ratios of throughput, each taken within a round."""
    summary: dict[str, Any] = {}
    for load in dict.fromkeys(run["load"] for run in runs):
        of_load = [run for run in runs if run["load"] == load and "error" not in run]
        targets: dict[str, Any] = {}
        for target in dict.fromkeys(run["target"] for run in of_load):
            of_target = [run for run in of_load if run["target"] == target]
            names = [name for name, value in of_target[0].items() if isinstance(value, float)]
            targets[target] = {name: statistics.median(run[name] for run in of_target) for name in names}
            targets[target]["num_runs"] = len(of_target)
            targets[target]["num_failed_requests"] = sum(run["num_failed_requests"] for run in of_target)
        ratios = {}
        for one, other in RATIOS if load == SATURATING else ():
            rates = [_by_round(of_load, name) for name in (one, other)]
            common = rates[0].keys() & rates[1].keys()
            if common:
                values = sorted(rates[0][number] / rates[1][number] for number in common)
                ratios[f"{one} / {other}"] = {"median": statistics.median(values), "all": values}
        summary[load] = {"targets": targets, "ratios": ratios}
    return summary


def format_report(result: dict[str, Any]) -> str:
    """Tables in Markdown."""
    lines = []
    for load, of_load in result["summary"].items():
        lines += [
            f"| {load} | output tokens/s | TTFT p50 | p99 | inter-token p50 | p99 | requests failed |",
            "|---|---|---|---|---|---|---|",
        ]
        for target, figures in of_load["targets"].items():
            cells = [f"{figures['output_tokens_per_second']:.0f}"]
            cells += [f"{figures[name]:.2f} s" for name in ("ttft_p50", "ttft_p99")]
            cells += [f"{figures[name] * 1000:.0f} ms" for name in ("itl_p50", "itl_p99")]
            lines.append(f"| {target} | {' | '.join(cells)} | {figures['num_failed_requests']} |")
        for name, ratio in of_load["ratios"].items():
            shown = ", ".join(f"{value:.2f}" for value in ratio["all"])
            lines += ["", f"{name}: {ratio['median']:.2f}x ({shown})"]
        lines.append("")
    failed = [run for run in result["runs"] if "error" in run]
    lines += [f"{run['load']}, {run['target']} failed: {run['error']}" for run in failed]
    return "\n".join(lines)


def _by_round(runs: list[Run], target: str) -> dict[int, float]:
    return {run["round"]: run["output_tokens_per_second"] for run in runs if run["target"] == target}


def _measure(target: str, load: str, args: argparse.Namespace, installer: Installer) -> dict[str, Any]:
    workload = [*LENGTHS, *LOADS[load], "--num-requests", str(args.num_requests), "--seed", "1"]
    if target.startswith("llama.cpp"):
        with _llama_server(args, installer) as url:
            return _bench(["--url", url, *workload, "--extra-body", '{"cache_prompt": false}'])
    engine = ["--max-num-seqs", str(NUM_SLOTS), "--max-model-len", str(MAX_MODEL_LEN), "--no-prefix-caching"]
    engine += ["--num-threads", str(args.threads)]
    if target.endswith("int4"):
        engine += ["--quantization", "int4"]
    if target.startswith("in process"):
        return _bench([str(args.model), *engine, *workload])
    with _steploop_server(args.model, engine) as url:
        return _bench(["--url", url, *workload])


def _bench(options: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "steploop", "bench", *options, "--json", "-"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _figures(report: dict[str, Any]) -> Run:
    (run,) = report["runs"]
    latencies, requests = run["latencies"], run["requests"]
    return {
        "duration": run["duration"],
        **run["throughput"],
        **{
            f"{name}_{quantile}": latencies[name][quantile]
            for name in ("ttft", "itl", "tpot", "e2e")
            for quantile in ("p50", "p99")
        },
        "client_cpu_share": run["client"]["cpu_share"],
        "num_failed_requests": requests["asked"] - requests["completed"],
        "errors": run["errors"],
        "num_truncated": run["lengths"]["num_truncated"],
        "warnings": run["warnings"],
    }


@contextmanager
def _steploop_server(model: Path, options: list[str]) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "steploop", "serve", str(model), "--port", str(port), *options]
    with _running(command, f"http://127.0.0.1:{port}") as url:
        yield url


@contextmanager
def _llama_server(args: argparse.Namespace, installer: Installer) -> Iterator[str]:
    program = installer.environment("llama-cpp") / "build" / "bin" / "llama-server"
    model = installer.model("q4_0.gguf")
    port = free_port()
    settings = {
        "max_num_seqs": NUM_SLOTS,
        "num_threads": args.threads,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
    }
    address = ["--host", "127.0.0.1", "--port", str(port)]
    command = [str(program), "--model", str(model), *address, *server_options(settings)]
    with _running(command, f"http://127.0.0.1:{port}") as url:
        yield url


@contextmanager
def _running(command: list[str], url: str) -> Iterator[str]:
    """A server, from when it is healthy to the end of the block."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_healthy(process, url)
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(10 * START_TIMEOUT_S):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            pass
        try:
            raise RuntimeError(f"the server ended with {process.wait(0.1)}")
        except subprocess.TimeoutExpired:
            pass
    raise RuntimeError(f"the server was not healthy within {START_TIMEOUT_S} seconds")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="GGUF", help="default: the demo model")
    parser.add_argument("--targets", type=_choices(TARGETS), default=list(TARGETS), help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--loads", type=_choices(tuple(LOADS)), default=list(LOADS), help=f"of {', '.join(LOADS)}")
    parser.add_argument("--rounds", type=positive, default=3, help="default 3")
    parser.add_argument("--num-requests", type=positive, default=96, help="of each run; default 96")
    parser.add_argument("--threads", type=positive, default=2, help="of each engine; default 2")
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers", help="where llama.cpp is, or goes")
    parser.add_argument("--output", type=Path, default=RESULTS / "servers.json")
    args = parser.parse_args(argv)
    args.model = args.model or find_demo_model()
    return args


def _choices(known: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := set(names) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())
