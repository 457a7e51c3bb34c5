"""The list of mutants under bench/results belongs to the kernels as they are, and none of them went unnoticed."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "csrc" / "kernels" / "cuda"
RESULTS = ROOT / "bench" / "results" / "cuda_mutants.json"


def _import(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tests" / "cuda_emulation"))
        return importlib.import_module(name)


mutant_sources = _import("mutant_sources")
mutants = _import("mutants")
SOURCES = mutant_sources.read_sources(KERNELS)
ALL = mutants.all_mutants(SOURCES)


def test_every_kind_is_found_in_the_shipped_sources():
    found = Counter(mutant.kind for mutant in ALL)
    assert set(found) == set(mutant_sources.KINDS) and min(found.values()) >= 10, found


def test_every_kernel_has_mutants_and_a_check():
    """Its code may also lie in a header of its own."""
    mutated = {mutant.file for mutant in ALL}
    for check, sources in mutants.CHECKS.items():
        files = {file for file in mutated if check in mutants.checks_of(file)}
        assert {source.split(".")[0] for source in sources} & {file.split(".")[0] for file in files}, check
    for file in mutated:
        assert mutants.checks_of(file), f"no check runs {file}"


def test_every_barrier_and_shuffle_is_covered():
    """Counted in another way than the generator finds them."""
    for kind, calls in (("barrier", ("__syncthreads(", "__syncwarp(")), ("shuffle", ("__shfl_",))):
        for file, source in SOURCES.items():
            code = [line.split("//")[0] for line in source.splitlines()]
            expected = sum(line.count(call) for line in code for call in calls)
            texts = [mutant for mutant in ALL if mutant.file == file and mutant.kind == kind]
            found = {(m.line, m.start) for m in texts if any(call in m.text for call in calls)}
            assert len(found) >= expected, file


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in ALL}))
def test_a_mutant_changes_its_own_line_and_nothing_else(file: str):
    source = SOURCES[file]
    own = [mutant for mutant in ALL if mutant.file == file]
    assert len({mutant.id for mutant in own}) == len(own)
    for mutant in own:
        changed = mutant.apply(source)
        assert changed != source
        assert changed[: mutant.start] == source[: mutant.start]
        assert changed[mutant.start + len(mutant.replacement) :] == source[mutant.end :]
        assert source.count("\n", 0, mutant.start) + 1 == mutant.line
        first = source.splitlines()[mutant.line - 1].split("//")[0]
        assert " ".join(first.split()) in mutant.text
        assert mutant.text != mutant.mutated


def test_text_in_comments_and_headers_is_left_alone():
    source = """// __syncthreads();
#include "x[1].h"
int host(int* p) { return p[1]; }
__device__ int one(const int* p /* p[2] */) { return p[0]; }  // if (x) __syncwarp();
"""
    found = mutant_sources.find_mutants("x.cu", source)
    assert [(m.line, m.kind, m.replacement) for m in found] == [(4, "index", "(p[0]) + 1"), (4, "index", "(0) + 1")]


def test_kinds_of_changes():
    source = """
__global__ void kernel(float* out, const float* in, int size) {
  float sum[2] = {}, top[2];
  const int i = threadIdx.x * 2;
  if (i >= size && in != nullptr) return;
  sum[0] = i + 1 < size ? in[i + 1] : 0;
  sum[0] += __shfl_xor_sync(kFullWarp, sum[0], 8);
  cp_async_wait<1>();
  if constexpr (kOdd) out[min(i, size - 1)] = sum[0];
}
int launch_kernel(int size) {
  if (size < 0 || size > 9) return cudaErrorInvalidValue;
  return 0;
}
"""
    found = [(m.line, m.kind, source[m.start : m.end], m.replacement) for m in mutant_sources.find_mutants("x", source)]
    assert found == [
        (4, "index", "threadIdx.x * 2", "(threadIdx.x * 2) + 1"),
        (5, "mask", "i >= size", "true"),
        (5, "mask", "in != nullptr", "true"),
        (6, "index", "0", "(0) + 1"),
        (6, "mask", "i + 1 < size", "false"),
        (6, "mask", "i + 1 < size", "true"),
        (6, "index", "i + 1", "(i + 1) + 1"),
        (7, "index", "0", "(0) + 1"),
        (7, "index", "0", "(0) + 1"),
        (7, "shuffle", "8", "(8) ^ 4"),
        (8, "barrier", "cp_async_wait<1>()", "/* cp_async_wait<1>() */"),
        (8, "barrier", "1", "1 + 1"),
        (9, "mask", "min(i, size - 1)", "(i)"),
        (9, "index", "min(i, size - 1)", "(min(i, size - 1)) + 1"),
        (9, "mask", "min(i, size - 1)", "(size - 1)"),
        (9, "index", "0", "(0) + 1"),
        (12, "mask", "size < 0", "false"),
        (12, "mask", "size > 9", "false"),
    ]


def test_every_redundant_mutant_exists():
    found = Counter((mutant.file, mutant.kind, mutant.change) for mutant in ALL)
    assert {entry: found[entry] for entry in mutants.REDUNDANT if found[entry] != 1} == {}


def test_results_are_those_of_the_kernels_as_they_are():
    if not RESULTS.exists():
        pytest.skip("no list of mutants; make mutants")
    results = json.loads(RESULTS.read_text())["mutants"]
    listed = {(m["file"], m["kind"], m["text"], m["mutated"], m["id"]) for m in results}
    expected = {(m.file, m.kind, m.text, m.mutated, m.id) for m in ALL}
    changed = sorted({entry[0] for entry in listed ^ expected})
    assert not changed, f"{', '.join(changed)} changed since the mutants were tried: run make mutants"
    survivors = [f"{m['file']}: {m['mutated']}" for m in results if m["outcome"] == "survived"]
    assert not survivors, survivors
    known = {mutant.id: mutants.redundancy(mutant) for mutant in ALL}
    for result in results:
        if result["outcome"] == "redundant":
            assert known[result["id"]], f"redundant without a reason: {result['file']}: {result['mutated']}"
