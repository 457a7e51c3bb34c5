# What the installed shared libraries need and export: little enough to run beside any supported torch.
from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import steploop
import steploop._C as native

PACKAGE = Path(steploop.__file__).parent
SYSTEM = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libpthread.so.0"}
NEEDED = {"_C": SYSTEM, "libsteploop_ops": SYSTEM | {"libtorch_cpu.so"}}

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads ELF files"),
    pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf"),
]


def library(name: str) -> Path:
    (path,) = PACKAGE.glob(f"{name}.*so")
    return path


def readelf(option: str, path: Path) -> str:
    return subprocess.run(["readelf", "-W", option, path], check=True, capture_output=True, text=True).stdout


def dynamic_symbols(path: Path) -> list[tuple[bool, str]]:
    # (whether defined here, name) of every global symbol.
    rows = [line.split() for line in readelf("--dyn-syms", path).splitlines()]
    rows = [row for row in rows if len(row) >= 8 and row[4] in ("GLOBAL", "WEAK")]
    return [(row[6] != "UND", row[7].split("@")[0]) for row in rows]


@pytest.mark.parametrize("name", NEEDED)
def test_needs_only_what_every_machine_and_torch_have(name: str) -> None:
    dynamic = readelf("-d", library(name))
    needed = {lib for lib in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic) if not lib.startswith("ld-linux")}
    assert needed <= NEEDED[name]
    assert ("libtorch_cpu.so" in needed) == (name == "libsteploop_ops")
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


def test_no_function_of_ours_is_exported_but_the_init_function() -> None:
    exported = {name for lib in NEEDED for defined, name in dynamic_symbols(library(lib)) if defined}
    assert "PyInit__C" in exported
    # Templates of the standard library may be there too; C++ shares those anyway.
    assert [name for name in exported if "steploop" in name] == []


def test_operators_use_nothing_of_torch_but_its_stable_c_interface() -> None:
    undefined = [name for defined, name in dynamic_symbols(library("libsteploop_ops")) if not defined]
    assert any(name.startswith("aoti_torch_") for name in undefined)
    # C++ names of torch would tie the library to one torch version: at, c10, caffe2 and torch are their namespaces.
    assert [name for name in undefined if re.match(r"_Z\w*?(2at|3c10|6caffe2|5torch)", name)] == []


def test_native_version_is_the_package_version() -> None:
    assert native.__version__ == importlib.metadata.version("steploop") == steploop.__version__
