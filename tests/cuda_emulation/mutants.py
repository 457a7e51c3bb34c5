"""Breaks the CUDA kernels in every small way and lists which check notices: `make mutants`.

Each mutant is a kernel with one barrier left out, one shuffle from another lane, one condition dropped or one index
shifted. It is compiled in emulation and run under the kernel's check, cheapest first: against the reference (in every
order of threads, cp.async eager and lazy), then under AddressSanitizer and UndefinedBehaviorSanitizer (bounds), then
under ThreadSanitizer (races). A mutant that none of them notices must be in REDUNDANT, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutant_sources import KINDS, Mutant, find_mutants, read_sources
from redundant_mutants import REDUNDANT

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "csrc" / "kernels" / "cuda"
EMULATION = ROOT / "tests" / "cuda_emulation"

# The checks, cheapest first, and what each runs of the kernels.
CHECKS = {
    "gather_rows": ("gather_rows.cu",),
    "embedding": ("embedding.cu", "gather_rows.cu"),
    "transfer_blocks": ("transfer_blocks.cu",),
    "silu_mul": ("silu_mul.cu",),
    "linear_epilogue": ("linear_epilogue.cu",),
    "rms_norm": ("rms_norm.cu",),
    "rope_kv_write": ("rope_kv_write.cu",),
    "gemm": ("gemm.cu",),
    "attention": ("attention.cu", "attention_decode.cu", "attention_prompt.cu"),
    "sample": ("sample.cu",),
}
# Also part of the programs: never changed, instrumented like the kernels.
HOST_SOURCES = (
    *(EMULATION / name for name in ("check.cpp", "kernel_check.cpp", "self_test.cpp")),
    *(ROOT / "csrc" / name for name in ("core/core.cpp", "kernels/attention_plan.cpp")),
    *(ROOT / "csrc" / "sample" / name for name in ("row_math.cpp", "sampler.cpp", "sampling_params.cpp")),
)
# The emulator itself is never instrumented: it tells the sanitizers what to know.
RUNTIME_SOURCES = tuple(
    EMULATION / name
    for name in re.findall(
        r"\w+\.cpp",
        (EMULATION / "CMakeLists.txt")
        .read_text()
        .partition("add_library(cuda_emulation_runtime STATIC")[2]
        .split(")")[0],
    )
)

# What a mutant goes through. "wide" is the reference once more, for heads that attention has other code for.
STAGES = ("reference", "wide", "bounds", "races")
STAGE_FLAGS: dict[str, list[str]] = {
    "reference": [],
    "wide": [],
    "bounds": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "races": ["-fsanitize=thread"],
}
RUNTIME_FLAGS = {"reference": [], "wide": [], "bounds": ["-DCUDA_EMULATION_ASAN"], "races": ["-DCUDA_EMULATION_TSAN"]}
COMMON_FLAGS = ["-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", "-w"]
# Two head dimensions do otherwise: one that fills a warp's copies evenly, and one that does not.
HEAD_DIMS = {stage: "64,256" if stage == "wide" else "64,96" for stage in STAGES}
INCLUDES = [f"-I{folder}" for folder in (EMULATION / "include", EMULATION, ROOT / "csrc")]

OUTCOMES = ("compiler", "reference", "bounds", "races", "time limit", "redundant", "survived")
FAILURE = re.compile(r"^FAILED .*|^cuda_emulation: .*|.*runtime error: .*|.*ERROR: AddressSanitizer: .*|.*Sanitizer:.*")


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if a mutant survived, 2 if the kernels fail their checks as they are."""
    args = _parse(argv)
    sources = read_sources(KERNELS)
    mutants = all_mutants(sources)
    known = _read_results(args.output)
    chosen = [m for m in mutants if not args.kernel or {m.file, m.file.split(".")[0]} & set(args.kernel)]
    if args.missing:
        chosen = [m for m in chosen if m.id not in known]
    chosen = chosen[: args.limit]
    if args.list:
        for mutant in chosen:
            print(f"{mutant.id:42} {mutant.file}:{mutant.line}\n    {mutant.change}")
        print(format_table([{"file": m.file, "kind": m.kind, "outcome": "mutants"} for m in chosen], ("mutants",)))
        return 0

    builder = Builder(sources, args.build_dir, args.jobs)
    needed = {check for mutant in chosen for check in checks_of(mutant.file)}
    checks = [check for check in CHECKS if check in needed]
    builder.build_unchanged(checks)
    if not builder.time_unchanged(checks):
        print("the kernels fail as they are; run kernel_check", file=sys.stderr)
        return 2
    start = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        tried = zip(chosen, pool.map(builder.try_mutant, chosen), strict=True)
        for number, (mutant, result) in enumerate(tried, 1):
            known[result["id"]] = result
            result = _with_reason(result, mutant)
            place = f"{result['file']}:{result['line']}"
            spent = sum(result["seconds"].values())
            count = f"[{number}/{len(chosen)}]"
            print(f"{count:10} {place:24} {result['kind']:8} {result['outcome']:10} {spent:6.1f} s", flush=True)
    results = [_with_reason(known[mutant.id], mutant) for mutant in mutants if mutant.id in known]
    if args.output:
        args.output.write_text(format_json(results))
    print(format_table(results, OUTCOMES))
    print(f"{len(chosen)} mutants in {(time.monotonic() - start) / 60:.1f} minutes")
    survivors = {result["id"] for result in results if result["outcome"] == "survived"}
    for mutant in mutants:
        if mutant.id in survivors:
            print(f"survived: {mutant.file}:{mutant.line} ({mutant.kind})\n    {mutant.change}")
    return 1 if survivors else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a JSON file; what it says of mutants not tried now is kept")
    parser.add_argument("--kernel", nargs="+", metavar="NAME", help="only these files, such as rms_norm or warp.cuh")
    parser.add_argument("--missing", action="store_true", help="only those that the output does not have")
    parser.add_argument("--limit", type=int, help="only the first so many")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="at once (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="list the mutants and try none")
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "mutants")
    return parser.parse_args(argv)


def all_mutants(sources: dict[str, str]) -> list[Mutant]:
    return [mutant for file, source in sources.items() for mutant in find_mutants(file, source)]


def redundancy(mutant: Mutant) -> str | None:
    """Why no check can notice it, if that is known."""
    return REDUNDANT.get((mutant.file, mutant.kind, mutant.change))


def checks_of(file: str) -> list[str]:
    """The checks that run code of a file of kernels, cheapest first."""
    sources = {path.name: path.read_text() for path in (*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh"))}

    def uses(source: str) -> bool:
        included = re.findall(r'#include "kernels/cuda/([\w.]+)"', sources.get(source, ""))
        return source == file or any(uses(name) for name in included if name in sources)

    return [check for check, kernels in CHECKS.items() if any(map(uses, kernels))]


# ---- Building and running --------------------------------------------------------------------------------------------


@dataclass
class Run:
    failure: str | None  # what the program said, if it failed
    timed_out: bool
    seconds: float


class Builder:
    """Keeps objects of everything unchanged, one set for each stage, and makes programs of them."""

    def __init__(self, sources: dict[str, str], folder: Path, jobs: int) -> None:
        self._folder = folder
        self._jobs = jobs
        self._compiler = os.environ.get("CXX", "c++").split()
        self._sources = sources
        self._limits: dict[tuple[str, str], float] = {}
        # ThreadSanitizer of some compilers cannot place its memory where the kernel randomizes addresses widely.
        fixed = ["setarch", "-R"]
        works = shutil.which("setarch") and subprocess.run([*fixed, "true"], capture_output=True).returncode == 0
        self._prefix = fixed if works else []

    def build_unchanged(self, checks: list[str]) -> None:
        """What the programs of these checks need and is not there yet, or older than what it is made of."""
        names = [name for check in checks for name in (f"check_{check}.cpp", *CHECKS[check])]
        sources = [(KERNELS if name.endswith(".cu") else EMULATION) / name for name in names]
        tasks = []
        for stage in STAGES:
            (self._folder / stage).mkdir(parents=True, exist_ok=True)
            for source in dict.fromkeys([*RUNTIME_SOURCES, *HOST_SOURCES, *sources]):
                target = self._object(stage, source.name)
                if (stage != "wide" or "attention" in checks) and not _is_current(target):
                    tasks.append((stage, source, target))
        print(f"compiling {len(tasks)} unchanged files", flush=True)
        with ThreadPoolExecutor(self._jobs) as pool:
            for (_, source, _), error in zip(tasks, pool.map(lambda task: self._compile(*task), tasks), strict=True):
                if error:
                    raise SystemExit(f"{source} does not compile:\n{error}")

    def time_unchanged(self, checks: Iterable[str]) -> bool:
        """Whether the kernels pass as they are. A mutant may take ten times as long."""
        tasks = [(stage, check) for stage in STAGES for check in checks if _has_stage(check, stage)]

        def act(task: tuple[str, str]) -> Run:
            stage, check = task
            program = self._folder / stage / f"unchanged_{check}"
            error = self._link(stage, check, [], program)
            return Run(error, False, 0) if error else self._run(program, check, 600)

        with ThreadPoolExecutor(self._jobs) as pool:
            for (stage, check), run in zip(tasks, pool.map(act, tasks), strict=True):
                print(f"unchanged: {check:16} {stage:10} {run.seconds:6.1f} s {run.failure or ''}", flush=True)
                if run.failure or run.timed_out:
                    return False
                self._limits[stage, check] = max(10 * run.seconds, 10)
        return True

    def try_mutant(self, mutant: Mutant) -> dict[str, Any]:
        """Where it was noticed and how, and how long each stage took."""
        work = self._folder / "mutants" / mutant.id
        result: dict[str, Any] = {
            "id": mutant.id,
            "file": mutant.file,
            "line": mutant.line,
            "kind": mutant.kind,
            "text": mutant.text,
            "mutated": mutant.mutated,
            "outcome": "survived",
            "seconds": {},
        }
        try:
            changed = work / "kernels" / "cuda" / mutant.file
            changed.parent.mkdir(parents=True, exist_ok=True)
            changed.write_text(mutant.apply(self._sources[mutant.file]))
            for stage in STAGES:
                start = time.monotonic()
                noticed = self._try_stage(mutant.file, work, stage)
                result["seconds"][stage] = round(time.monotonic() - start, 2)
                if noticed:
                    return result | noticed
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return result

    def _try_stage(self, file: str, work: Path, stage: str) -> dict[str, str] | None:
        for check in checks_of(file):
            if not _has_stage(check, stage):
                continue
            replaced = []
            for kernel in CHECKS[check] if file.endswith(".cuh") else [file]:
                source = KERNELS / kernel if kernel != file else work / "kernels" / "cuda" / file
                target = work / f"{kernel}.{stage}.o"
                error = None if target.exists() else self._compile(stage, source, target, [f"-I{work}"])
                if error:
                    return {"outcome": "compiler", "how": _shorten(error)}
                replaced.append(target)
            program = work / f"{check}.{stage}"
            error = self._link(stage, check, replaced, program)
            if error:
                return {"outcome": "compiler", "how": _shorten(error)}
            run = self._run(program, check, self._limits[stage, check])
            if run.timed_out:
                return {"outcome": "time limit", "check": check, "how": f"{stage}: no end"}
            if run.failure:
                outcome = "reference" if stage == "wide" else stage
                return {"outcome": outcome, "check": check, "how": _shorten(run.failure)}
        return None

    def _object(self, stage: str, source: str) -> Path:
        return self._folder / stage / f"{source}.o"

    def _compile(self, stage: str, source: Path, target: Path, includes: Iterable[str] = ()) -> str | None:
        flags = ["-O2", *RUNTIME_FLAGS[stage]] if source in RUNTIME_SOURCES else ["-O1", *STAGE_FLAGS[stage]]
        head_dims = f"-DSTEPLOOP_ATTENTION_HEAD_DIMS={HEAD_DIMS[stage]}"
        command = [*self._compiler, *COMMON_FLAGS, head_dims, *flags, *includes, *INCLUDES]
        start = time.time()
        error = _error_of([*command, "-MMD", "-x", "c++", "-c", str(source), "-o", str(target)])
        if not error:
            os.utime(target, (start, start))  # so that what changed meanwhile counts as newer
        return error

    def _link(self, stage: str, check: str, replaced: list[Path], program: Path) -> str | None:
        names = [*(path.name for path in (*RUNTIME_SOURCES, *HOST_SOURCES)), f"check_{check}.cpp", *CHECKS[check]]
        new = {path.name.rsplit(f".{stage}.o", 1)[0] for path in replaced}
        # Mutants come first: of an inline function in several objects the linker takes the first.
        objects = [*replaced, *(self._object(stage, name) for name in names if name not in new)]
        command = [*self._compiler, *STAGE_FLAGS[stage], *map(str, objects), "-pthread", "-o", str(program)]
        return _error_of(command)

    def _run(self, program: Path, check: str, limit: float) -> Run:
        """To the first failure: on a terminal the program prints each line at once."""
        start = time.monotonic()
        master, slave = pty.openpty()
        environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
        command = [*self._prefix, str(program), check]
        process = subprocess.Popen(command, stdout=slave, stderr=slave, env=environment, start_new_session=True)
        os.close(slave)
        output, failure, timed_out = "", None, False
        try:
            while failure is None:
                left = start + limit - time.monotonic()
                if not select.select([master], [], [], max(left, 0))[0]:
                    timed_out = True
                    break
                try:
                    data = os.read(master, 1 << 16)
                except OSError:  # the program has ended
                    break
                output = output[-(1 << 16) :] + data.decode(errors="replace").replace("\r", "")
                lines = output[: output.rfind("\n") + 1].splitlines()
                failure = next((line for line in lines if FAILURE.match(line)), None)
            if failure is None and not timed_out:
                code = process.wait(max(start + limit - time.monotonic(), 1))
                if code != 0:
                    signal_name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    failure = f"{signal_name} {output.strip().splitlines()[-1:]}"
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(master)
        return Run(failure, timed_out, time.monotonic() - start)


def _has_stage(check: str, stage: str) -> bool:
    return stage != "wide" or check == "attention"


def _is_current(target: Path) -> bool:
    """Whether an object is newer than all files that the compiler read for it, and than the flags above."""
    listed = target.with_suffix(".d")
    if not target.exists() or not listed.exists():
        return False
    needed = [Path(__file__), *map(Path, listed.read_text().replace("\\\n", " ").split()[1:])]
    return all(path.exists() and path.stat().st_mtime < target.stat().st_mtime for path in needed)


def _error_of(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode == 0 else done.stderr or f"exit code {done.returncode}"


def _shorten(message: str) -> str:
    """The part that says what was wrong, without colours, addresses and paths."""
    message = re.sub(r"\x1b\[[\d;]*m", "", message)
    lines = [line for line in message.splitlines() if "error" in line.lower()] or message.splitlines() or [""]
    line = re.sub(r"==\d+==|0x[\da-f]+|\(pid=\d+\)", "", lines[0])
    line = re.sub(r"(?:/[\w.+-]+)+/", "", line)
    return " ".join(line.split())[:160]


# ---- Results ---------------------------------------------------------------------------------------------------------


def _with_reason(result: dict[str, Any], mutant: Mutant) -> dict[str, Any]:
    """A result as it stands today: with the mutant's line, and redundant if that is known of a survivor."""
    result = {name: value for name, value in result.items() if name != "why"} | {"line": mutant.line}
    if result["outcome"] not in ("survived", "redundant"):
        return result
    reason = redundancy(mutant)
    return result | ({"outcome": "redundant", "why": reason} if reason else {"outcome": "survived"})


def _read_results(path: Path | None) -> dict[str, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    return {result["id"]: result for result in json.loads(path.read_text())["mutants"]}


def format_json(results: list[dict[str, Any]]) -> str:
    """One mutant a line."""
    totals: dict[str, dict[str, dict[str, int]]] = {}
    for result in results:
        kinds = totals.setdefault(result["file"], {})
        outcomes = kinds.setdefault(result["kind"], {})
        outcomes[result["outcome"]] = outcomes.get(result["outcome"], 0) + 1
    overall = dict(Counter(result["outcome"] for result in results))
    lines = ",\n  ".join(json.dumps(result) for result in results)
    return (
        f'{{\n "total": {json.dumps({"mutants": len(results), **overall})},\n'
        f' "totals": {json.dumps(totals, indent=1).replace(chr(10), chr(10) + " ")},\n'
        f' "mutants": [\n  {lines}\n ]\n}}\n'
    )


def format_table(results: list[dict[str, Any]], columns: tuple[str, ...]) -> str:
    """A row for each file, then one for each kind."""
    rows = [["", "mutants", *(column for column in columns if column != "mutants")]]
    groups = [("file", name) for name in dict.fromkeys(result["file"] for result in results)]
    for field, name in [*groups, *(("kind", kind) for kind in KINDS), ("", "all")]:
        members = [result for result in results if not field or result[field] == name]
        counts = Counter(result["outcome"] for result in members)
        rows.append([name, str(len(members)), *(str(counts[column] or "") for column in rows[0][2:])])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
