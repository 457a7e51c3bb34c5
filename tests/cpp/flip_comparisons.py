"""Flips every comparison of the scheduling policies, one at a time, and lists which scenario notices.

    flip_comparisons.py --output bench/results/scheduler_flips.json

`<` becomes `<=`, `==` becomes `!=`, std::min becomes std::max, and so on. Each changed source is compiled and linked
with the rest, and the tables of tests/scenarios (see scheduler_tables.cpp) are run: one of them must fail. A flip that
none notices must be in EQUIVALENT, with the reason why it changes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "csrc"
SCENARIOS = ROOT / "tests" / "scenarios"

# Where scheduling is decided. Elsewhere in csrc/sched: settings are validated and integrity is checked.
FILES = (
    "sched/admission.cpp",
    "sched/budget.cpp",
    "sched/fair_order.cpp",
    "sched/fair_order.h",
    "sched/preemption.cpp",
    "sched/queue_order.cpp",
    "sched/requests.cpp",
    "sched/scheduler.cpp",
    "sched/scheduler.h",
    "sched/sequence.cpp",
    "sched/sequence.h",
    "sched/sequence_heap.h",
    "sched/starting.cpp",
    "sched/step_cost.cpp",
    "sched/step_cost.h",
    "sched/waiting_queue.cpp",
    "sched/waiting_queue.h",
)
TIMEOUT_S = 10
MEMORY_BYTES = 2 << 30

_GUARDED = "the line only gets there when the two differ"
_DISTINCT = "two sequences never have the same number of arrival, and none is compared with itself"
_RESERVES = "only when memory is reserved, not what is scheduled"

# (file, line of text, flip): why no scenario can tell the difference.
EQUIVALENT = {
    (
        "sched/admission.cpp",
        "if (a->priority_class != b->priority_class) return a->priority_class > b->priority_class;",
        "> to >=",
    ): _GUARDED,
    (
        "sched/admission.cpp",
        "if (a->num_output_tokens() != b->num_output_tokens()) return a->num_output_tokens() < b->num_output_tokens();",
        "< to <=",
    ): _GUARDED,
    ("sched/admission.cpp", "return a->arrival_number > b->arrival_number;", "> to >="): _DISTINCT,
    (
        "sched/fair_order.h",
        "bool operator()(const Sequence& a, const Sequence& b) const { return a.arrival_number < b.arrival_number; }",
        "< to <=",
    ): _DISTINCT,
    (
        "sched/queue_order.cpp",
        "if (a.priority_class != b.priority_class) return a.priority_class < b.priority_class;",
        "< to <=",
    ): _GUARDED,
    ("sched/queue_order.cpp", "return a.arrival_number < b.arrival_number;", "< to <="): _DISTINCT,
    (
        "sched/queue_order.cpp",
        "if (a.num_prompt_tokens != b.num_prompt_tokens) return a.num_prompt_tokens < b.num_prompt_tokens;",
        "< to <=",
    ): _GUARDED,
    ("sched/queue_order.cpp", "return a.arrival_number < b.arrival_number;", "< to <= (2)"): _DISTINCT,
    (
        "sched/requests.cpp",
        "if (config_.blocks.num_host_blocks > 0) sequence.host_blocks.reserve(most_blocks);",
        "> to >=",
    ): _RESERVES,
    (
        "sched/requests.cpp",
        "if (output_.timed_out.capacity() < deadlines_.size()) output_.timed_out.reserve(2 * deadlines_.size());",
        "< to <=",
    ): _RESERVES,
    (
        "sched/scheduler.cpp",
        "if (scheduled.num_sample_rows > 0 && next_sample != sampled.end() && next_sample->sequence == sequence.id)",
        "> to >=",
    ): "check_samples() lets no sample of a sequence pass that has no row for one",
    (
        "sched/step_cost.cpp",
        "if (spread < 1e-3 * tokens_ * tokens_ || empty()) return -1;",
        "< to <=",
    ): "two such sums are not equal to the last bit, but when empty(), which is looked at in any case",
    (
        "sched/waiting_queue.cpp",
        "if (a.priority_class != b.priority_class) return a.priority_class < b.priority_class;",
        "< to <=",
    ): _GUARDED,
    ("sched/waiting_queue.cpp", "return a.arrival_number < b.arrival_number;", "< to <="): _DISTINCT,
}

FLIPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "min": "max", "max": "min"}


@dataclass(frozen=True)
class Flip:
    file: str
    line: int
    text: str  # of the line
    flip: str  # "< to <=", with " (2)" for the second such on its line and so on
    start: int  # in the source
    end: int
    replacement: str

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.file, self.text, self.flip)

    def apply(self, source: str) -> str:
        return source[: self.start] + self.replacement + source[self.end :]


def code_of(source: str) -> str:
    """The source with comments and texts blanked out, and what only checks or complains."""
    blank = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|#[^\n]*', re.DOTALL)
    code = blank.sub(lambda match: " " * len(match[0]), source)
    for match in re.finditer(r"\bSL_D?CHECK\(|\bthrow\b|\bstatic_assert\(|\btemplate <", code):
        end = code.index("\n" if "template" in match[0] else ";", match.end())
        start = match.start()
        if match[0] == "throw":  # with the condition that guards it
            start = max(code.rfind(mark, 0, start) for mark in ";{}") + 1
        code = code[:start] + re.sub(r"[^\n]", " ", code[start:end]) + code[end:]
    # Plain bounds of loops decide nothing.
    bound = re.compile(r"\bfor \([^;()]*(?:\([^;()]*\)[^;()]*)*; *([\w.]+ (?:<|<=|>|>=|!=) [\w.>()-]+) *;")
    for match in bound.finditer(code):
        code = code[: match.start(1)] + " " * len(match[1]) + code[match.end(1) :]
    return code


def find_flips(file: str, source: str) -> list[Flip]:
    code = code_of(source)
    comparison = re.compile(r"(?<= )(?:<=|>=|==|!=|<|>)(?=[ \n])|(?<=\bstd::)(?:min|max)(?=[<({_])")
    counts: dict[tuple[str, str], int] = {}
    flips = []
    for match in comparison.finditer(code):
        start = source.rfind("\n", 0, match.start()) + 1
        text = " ".join(source[start : source.index("\n", match.start())].split())
        flip = f"{match[0]} to {FLIPS[match[0]]}"
        count = counts[text, flip] = counts.get((text, flip), 0) + 1
        line = source.count("\n", 0, match.start()) + 1
        name = flip if count == 1 else f"{flip} ({count})"
        flips.append(Flip(file, line, text, name, match.start(), match.end(), FLIPS[match[0]]))
    return flips


def find_all_flips(sources: Path = SOURCES) -> list[Flip]:
    return [flip for file in FILES for flip in find_flips(file, (sources / file).read_text())]


# ---- Building and running --------------------------------------------------------------------------------------------


class Builder:
    """Objects of all that the program needs, and programs in which one source is another.

    Works on a copy of the sources, so that nobody changes them meanwhile.
    """

    def __init__(self, folder: Path, jobs: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._folder = folder
        self._sources = folder / "csrc"
        for part in ("core", "kv", "sched"):
            shutil.copytree(SOURCES / part, self._sources / part)
        sources = [self._sources / "core/core.cpp", *self._sources.glob("kv/*.cpp"), *self._sources.glob("sched/*.cpp")]
        sources.append(ROOT / "tests/cpp/scheduler_tables.cpp")
        self._objects = {source: folder / f"{source.stem}.o" for source in sources}
        with ThreadPoolExecutor(jobs) as pool:
            for error in pool.map(lambda item: self._compile(*item, folder), self._objects.items()):
                if error:
                    sys.exit(error)

    def flips(self) -> list[Flip]:
        return find_all_flips(self._sources)

    def try_flip(self, index: int, flip: Flip | None) -> str | None:
        """What notices the flip; None: nothing does."""
        folder = self._folder / str(index)
        objects = dict(self._objects)
        if flip is not None:
            error = self._compile_flipped(folder, flip, objects)
            if error:
                return "the compiler"
        program = folder / "scheduler_tables"
        program.parent.mkdir(parents=True, exist_ok=True)
        command = [*_compiler(), "-o", str(program), *map(str, objects.values())]
        link = subprocess.run(command, capture_output=True, text=True)
        if link.returncode:
            sys.exit(link.stderr)
        try:
            return _run(program)
        finally:
            shutil.rmtree(folder)

    def _compile_flipped(self, folder: Path, flip: Flip, objects: dict[Path, Path]) -> str | None:
        if flip.file.endswith(".h"):  # found before the real one, in all that may include it
            changed = folder / flip.file
            for source in objects:
                if source.parent.name != "kv":
                    objects[source] = folder / f"{source.stem}.o"
        else:
            changed = folder / Path(flip.file).name
            objects[self._sources / flip.file] = folder / f"{changed.stem}.o"
        changed.parent.mkdir(parents=True, exist_ok=True)
        changed.write_text(flip.apply((self._sources / flip.file).read_text()))
        for source, target in objects.items():
            if target.parent == folder:
                error = self._compile(changed if changed.name == source.name else source, target, folder)
                if error:
                    return error
        return None

    def _compile(self, source: Path, target: Path, first_include: Path) -> str | None:
        options = ["-std=c++20", "-O0", "-w", "-DSTEPLOOP_DEBUG_CHECKS", "-D_GLIBCXX_ASSERTIONS"]
        options.append(f'-DSTEPLOOP_SCENARIOS="{SCENARIOS}"')
        options += [f"-I{first_include}", f"-I{self._sources}", "-c", str(source), "-o", str(target)]
        run = subprocess.run([*_compiler(), *options], capture_output=True, text=True)
        return run.stderr if run.returncode else None


def _compiler() -> list[str]:
    return os.environ.get("CXX", "c++").split()


def _run(program: Path) -> str | None:
    def limit_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    try:
        run = subprocess.run([str(program)], capture_output=True, text=True, timeout=TIMEOUT_S, preexec_fn=limit_memory)
    except subprocess.TimeoutExpired:
        return "no end"
    if run.returncode == 0:
        return None
    if run.returncode < 0:
        return f"a crash (signal {-run.returncode})"
    # "path/file.txt:12: the title\n  step 3: what differs"
    where, _, rest = run.stderr.partition("\n")
    file, _, title = where.partition(": ")
    return f"{Path(file).name.split(':')[0]}: {title}, {rest.split(':')[0].strip()}"


# ---- The list --------------------------------------------------------------------------------------------------------


def read_results(path: Path) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads(path.read_text())["flips"] if path.exists() else []
    return results


def key_of(result: dict[str, Any]) -> tuple[str, str, str]:
    return (result["file"], result["text"], result["flip"])


def _entries(flips: list[Flip], noticed: dict[tuple[str, str, str], str | None]) -> Iterator[dict[str, Any]]:
    for flip in flips:
        entry: dict[str, Any] = {"file": flip.file, "line": flip.line, "text": flip.text, "flip": flip.flip}
        entry["noticed_by"] = noticed[flip.key]
        if noticed[flip.key] is None:
            entry["reason"] = EQUIVALENT.get(flip.key)
        yield entry


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--missing", action="store_true", help="only those that no scenario is known to notice")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="at once (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="list the flips and try none")
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "flips")
    args = parser.parse_args(argv)

    if args.list:
        print("\n".join(f"{flip.file}:{flip.line}: {flip.flip}: {flip.text}" for flip in find_all_flips()))
        return 0
    builder = Builder(args.build_dir, args.jobs)
    flips = builder.flips()
    noticed: dict[tuple[str, str, str], str | None] = {}
    if args.missing:
        noticed = {key_of(entry): entry["noticed_by"] for entry in read_results(args.output) if entry["noticed_by"]}
    todo = [flip for flip in flips if flip.key not in noticed]
    if failure := builder.try_flip(0, None):
        sys.exit(f"with nothing flipped, something fails: {failure}")
    with ThreadPoolExecutor(args.jobs) as pool:
        outcomes = pool.map(builder.try_flip, range(1, len(todo) + 1), todo)
        for flip, outcome in zip(todo, outcomes, strict=True):
            noticed[flip.key] = outcome
            print(f"{flip.file}:{flip.line}: {flip.flip}: {outcome or 'SURVIVED'}", flush=True)

    entries = list(_entries(flips, noticed))
    if args.output:
        lines = ",\n".join("  " + json.dumps(entry, ensure_ascii=False) for entry in entries)
        args.output.write_text(f'{{\n "flips": [\n{lines}\n ]\n}}\n')
    survivors = [entry for entry in entries if not entry["noticed_by"] and not entry["reason"]]
    num_equivalent = sum("reason" in entry for entry in entries) - len(survivors)
    print(f"{len(entries)} flips, {num_equivalent} of them without effect, {len(survivors)} survived")
    for entry in survivors:
        print(f"survived: {entry['file']}:{entry['line']}: {entry['flip']}\n    {entry['text']}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
