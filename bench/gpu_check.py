"""Checks steploop on a machine with a GPU: builds it, tests it, times it, and says which targets are met.

python bench/gpu_check.py                   # everything, in under 8 minutes
python bench/gpu_check.py --stages kernels  # of what is built and installed
python bench/gpu_check.py --emulate DIR     # without a GPU: that the check itself works

Writes gpu_check.json and gpu_check.log into $OUT, else into build/gpu_check.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu.packages import find_sanitizer, held_by, is_there, missing_packages, needed_to_build
from gpu.stages import Command, Runner, SkipStage, Stage, worst
from gpu.summary import summarise
from gpu.table import table

ROOT = Path(__file__).resolve().parents[1]
GPU = ROOT / "bench" / "gpu"
TOTAL_S = 465.0
BUILD_FOLDER = ROOT / "build" / "gpu"
PROGRAMS = ("bench_cuda_attention", "bench_cuda_gemm", "bench_cuda_rows")
DEFINES = {"STEPLOOP_CUDA": "ON", "STEPLOOP_BUILD_TESTS": "ON", "STEPLOOP_BUILD_BENCH": "ON"}
EMULATED_LIBRARY = "libsteploop_cuda_emulated.so"


class Check:
    """The stages, on a GPU or emulated."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._wheels: Path | None = args.wheels
        self._all_architectures: bool = args.all_architectures
        self._emulated: Path | None = args.emulate
        self._programs = args.emulate or BUILD_FOLDER / "bench" / "micro"
        self._environment = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        if args.emulate:
            self._environment["STEPLOOP_CUDA_LIBRARY"] = str(args.emulate / EMULATED_LIBRARY)

    def stages(self) -> list[Stage]:
        """All of them, in order."""
        return [
            Stage("environment", 30, 10, self._show_environment, is_required=True),
            Stage("build", 180, 60, self._build),
            Stage("tests", 60, 20, self._test),
            Stage("sanitizer", 45, 15, self._sanitize),
            Stage("rates", 30, 10, self._measure_rates),
            Stage("kernels", 75, 30, self._time_kernels),
            Stage("engine", 90, 40, self._run_engine),
            Stage("peers", 100, 10, self._run_peers),
        ]

    def _show_environment(self) -> list[Command]:
        return [self._python("environment", [str(GPU / "environment.py")], 30)]

    def _build(self) -> list[Command]:
        self._skip_if_emulated("what is emulated is built already")
        pip = ["-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
        commands = []
        missing = missing_packages()
        if carried := held_by(self._wheels, missing):
            sources = ["--no-index", "--find-links", str(self._wheels)]
            commands.append(self._python("carried wheels", [*pip, *sources, "--upgrade", *carried], 40))
        if lacking := needed_to_build([name for name in missing if name not in carried]):
            raise RuntimeError(f"the build needs {', '.join(lacking)}; --wheels DIR takes them from a folder")
        defines = dict(DEFINES)
        if not self._all_architectures and (architecture := device_architecture()):
            # One architecture compiles in half the time of all.
            defines["STEPLOOP_CUDA_ARCHITECTURES"] = f"{architecture}-real"
        settings = [f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()]
        settings.append(f"--config-settings=build-dir={BUILD_FOLDER}")
        commands.append(
            self._python("build and install", [*pip, "--no-build-isolation", "--force-reinstall", *settings, "."], 180)
        )
        return commands

    def _test(self) -> list[Command]:
        pytest = self._python(
            "pytest -m gpu", ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/python"], 60
        )
        if self._emulated:
            pytest.ok_codes = (0, 5)  # 5: no test was selected, since there is no GPU
        pytest.read = read_pytest
        return [pytest]

    def _sanitize(self) -> list[Command]:
        self._skip_if_emulated("the sanitizers for emulated kernels are those of the host")
        sanitizer = find_sanitizer()
        if sanitizer is None:
            raise SkipStage("compute-sanitizer is not there")
        commands = []
        for tool in ("memcheck", "racecheck"):
            for program in PROGRAMS:
                command = self._program(program, ["--scale", "tiny"], 20)
                command.name = f"{tool} {program}"
                command.arguments = [sanitizer, "--tool", tool, "--error-exitcode", "9", *command.arguments]
                command.read = read_sanitizer
                commands.append(command)
        return commands

    def _measure_rates(self) -> list[Command]:
        self._skip_if_emulated("there is no device to measure")
        return [self._python("torch", [str(GPU / "rates.py")], 30)]

    def _time_kernels(self) -> list[Command]:
        scale = ["--scale", "tiny"] if self._emulated else []
        return [self._program(program, ["--json", *scale], 40) for program in PROGRAMS]

    def _run_engine(self) -> list[Command]:
        models = ["tiny"] if self._emulated else ["llama_3_8b", "smollm2_135m"]
        return [self._python(model, [str(GPU / "end_to_end.py"), model], 60) for model in models]

    def _run_peers(self) -> list[Command]:
        self._skip_if_emulated("others have no emulated device")
        if not is_there("transformers"):
            raise SkipStage("transformers is not there")
        return [self._python(model, [str(GPU / "peers.py"), model], 60) for model in ("llama_3_8b", "smollm2_135m")]

    def _skip_if_emulated(self, reason: str) -> None:
        if self._emulated:
            raise SkipStage(f"emulated: {reason}")

    def _python(self, name: str, arguments: list[str], limit_s: float) -> Command:
        return Command(name, [sys.executable, *arguments], limit_s, dict(self._environment))

    def _program(self, name: str, arguments: list[str], limit_s: float) -> Command:
        return Command(name, [str(self._programs / name), *arguments], limit_s, dict(self._environment))


def device_architecture() -> str | None:
    """Such as "90": of the first device."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=15).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.match(r"(\d+)\.(\d)", answer)
    return match[1] + match[2] if match else None


def read_pytest(text: str) -> list[dict[str, Any]]:
    """How many tests passed and so on, by pytest's last words; nothing where it did not come so far."""
    closing = [line for line in text.splitlines() if re.search(r" in \d+\.\d+s\b", line)]
    counts = re.findall(r"(\d+) (passed|failed|errors?|skipped|deselected)", closing[-1]) if closing else []
    return [{"name": "pytest", **{what: int(number) for number, what in counts}}] if counts else []


def read_sanitizer(text: str) -> list[dict[str, Any]]:
    """How much it found, by its last line; nothing where it did not come so far."""
    tools = {"ERROR SUMMARY": "memcheck", "RACECHECK SUMMARY": "racecheck"}
    found = re.findall(r"(ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", text)
    return [{"name": tools[what], "findings": int(number)} for what, number in found[-1:]]


def main(argv: list[str] | None = None) -> int:
    """Runs the stages asked for, prints a table, returns 1 if one of them failed or ran out of time."""
    args = _parse(argv)
    stages = Check(args).stages()
    names = [stage.name for stage in stages]
    for name, seconds in args.limits:
        if name not in names:
            print(f"no stage is called {name!r}; there are {', '.join(names)}", file=sys.stderr)
            return 2
        stages[names.index(name)].limit_s = seconds
    if unknown := sorted(set(args.stages or []) - set(names)):
        print(f"no stage is called {unknown[0]!r}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"emulated": args.emulate is not None}
    folder = Path(os.environ.get("OUT") or ROOT / "build" / "gpu_check")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is ended on the way out
    runner = Runner(report, summarise, folder, ROOT, args.total)
    runner.run([stage for stage in stages if not args.stages or stage.name in args.stages])
    print("\n" + table(report))
    return 0 if worst([entry["status"] for entry in report["stages"]]) in ("passed", "skipped") else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="folder of wheels for packages that are not installed"
    )
    parser.add_argument("--emulate", type=Path, metavar="DIR", help=f"folder with {EMULATED_LIBRARY} and {PROGRAMS[0]}")
    parser.add_argument("--stages", nargs="+", help="only these")
    parser.add_argument("--total", type=float, default=TOTAL_S, help="seconds for all stages; default %(default)s")
    parser.add_argument(
        "--limits", nargs="+", type=_limit, default=[], metavar="STAGE=SECONDS", help="instead of the stages' own"
    )
    parser.add_argument("--all-architectures", action="store_true", help="build for more than the device that is here")
    args = parser.parse_args(argv)
    if args.emulate:
        args.emulate = args.emulate.resolve()
        if not args.emulate.is_dir():
            parser.error(f"{args.emulate} is no folder")
    return args


def _limit(text: str) -> tuple[str, float]:
    name, _, seconds = text.partition("=")
    try:
        return name, float(seconds)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected STAGE=SECONDS, got {text!r}") from None


if __name__ == "__main__":
    sys.exit(main())
