"""The compiled matrix micro-kernels keep their accumulators in registers: no vector goes to the stack and back."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


# Those of tile_avx512*.S are not compiled. Of what GCC makes for AVX2, bfloat16 (which has no instruction there) and
# 4 bits need more registers than there are.
@pytest.mark.parametrize(
    ("isa", "pattern", "at_least"),
    [("avx512", r"avx512::streamed_tile<.*", 18), ("avx2", r"avx2::tile<steploop::avx2::(?:Float32|Int8)Dot.*", 14)],
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_tiles_do_not_spill(isa: str, pattern: str, at_least: int) -> None:
    # The build tree that `make test` installed from; installed libraries carry no names.
    found = sorted((ROOT / "build" / "checked").glob(f"CMakeFiles/steploop_{isa}.dir/**/kernels_{isa}.cpp.o"))
    if not found:
        assert "STEPLOOP_TEST_WHEELS" not in os.environ, "no kernel object in the build tree of make test"
        pytest.skip("no build tree beside these tests")
    listing = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", found[0]], check=True, capture_output=True, text=True
    ).stdout
    tiles = re.findall(rf"^[0-9a-f]+ <(.*{pattern})>:\n((?:.+\n)+)", listing, re.MULTILINE)
    assert len(tiles) >= at_least, f"only {len(tiles)} tiles in {found[0].name}"
    for name, body in tiles:
        spills = [
            line for line in body.splitlines() if re.search(r"[yz]mm\d+,.*\(%r[sb]p|\(%r[sb]p[^)]*\),%[yz]mm", line)
        ]
        assert not spills, f"{name} spills: {spills[:3]}"
