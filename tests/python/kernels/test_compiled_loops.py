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


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_tiles_do_not_spill() -> None:
    # The build tree that `make test` installed from; installed libraries carry no names.
    found = sorted((ROOT / "build" / "checked").glob("CMakeFiles/steploop_avx512.dir/**/kernels_avx512.cpp.o"))
    if not found:
        assert "STEPLOOP_TEST_WHEELS" not in os.environ, "no kernel object in the build tree of make test"
        pytest.skip("no build tree beside these tests")
    listing = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", found[0]], check=True, capture_output=True, text=True
    ).stdout
    tiles = re.findall(r"^[0-9a-f]+ <(.*avx512::tile<.*)>:\n((?:.+\n)+)", listing, re.MULTILINE)
    assert len(tiles) >= 60, f"only {len(tiles)} tiles in {found[0].name}: built without AVX-512?"
    for name, body in tiles:
        spills = [line for line in body.splitlines() if re.search(r"zmm\d+,.*\(%r[sb]p|\(%r[sb]p[^)]*\),%zmm", line)]
        assert not spills, f"{name} spills: {spills[:3]}"
        assert "vdpbf16ps" in body or "vfmadd" in body
