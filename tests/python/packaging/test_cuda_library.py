"""The CUDA library as it is compiled: registers, spills and instructions of every kernel, and what it needs to load."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import steploop

LIBRARY = Path(steploop.__file__).with_name("libsteploop_cuda.so")
ARCHITECTURES = "sm_80", "sm_90"
SYSTEM = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"}

# The most registers that a thread may take, by kernel and, where instances differ, the numbers of its template. More
# would cost blocks per SM: a ceiling is close above what is needed now, most of them where the next block is lost.
MAX_REGISTERS = {
    "attention_decode_kernel": {(64,): 168, (96,): 240, (128,): 255, (256,): 255},
    "attention_prompt_kernel": {(64,): 168, (96,): 168, (128,): 224, (256,): 255},
    "embedding_kernel": 40,
    "gather_rows_kernel": 40,
    "gemm_kernel": {
        (16, 16): 96,
        (16, 32): 96,
        (16, 64): 96,
        (64, 32): 96,
        (64, 64): 128,
        (128, 128): 255,
    },  # by the rows and columns of a tile
    "merge_kernel": 40,
    "probe_kernel": 8,
    "rms_norm_kernel": 64,
    "rope_kv_write_kernel": 40,
    "sample_kernel": 64,
    "silu_mul_kernel": 40,
    "store_kernel": 32,
    "store_silu_mul_kernel": 32,
    "transfer_blocks_kernel": 40,
}

# What the kernels were written for: the tensor cores, fed by ldmatrix and asynchronous copies; 16 bytes at a time.
TENSOR_CORE = r"HMMA\.16816\.F32", r"LDSM\.16", r"LDGSTS\S*\.128"
WIDE_LOAD, WIDE_STORE = r"LDG\.E\.128", r"STG\.E\.128"
INSTRUCTIONS = {
    "attention_decode_kernel": TENSOR_CORE,
    "attention_prompt_kernel": TENSOR_CORE,
    "gemm_kernel": TENSOR_CORE,
    "embedding_kernel": (WIDE_STORE,),
    "gather_rows_kernel": (WIDE_LOAD, WIDE_STORE),
    "rms_norm_kernel": (WIDE_LOAD, WIDE_STORE),
    "rope_kv_write_kernel": (WIDE_LOAD,),
    "silu_mul_kernel": (WIDE_LOAD, WIDE_STORE),
    "transfer_blocks_kernel": (WIDE_LOAD, WIDE_STORE),
}
MAX_ATTENTION_INSTANCES = 24  # of one architecture

pytestmark = pytest.mark.skipif(
    not LIBRARY.exists() and ("STEPLOOP_TEST_WHEELS" not in os.environ or shutil.which("nvcc") is None),
    reason="steploop was built without nvcc",
)


@dataclass
class Kernel:
    """One instance on one architecture."""

    name: str
    numbers: tuple[int, ...]  # of its template's arguments
    usage: dict[str, int]
    instructions: Counter[str] = field(default_factory=Counter)

    def max_registers(self) -> int:
        ceiling = MAX_REGISTERS[self.name]
        if isinstance(ceiling, int):
            return ceiling
        return ceiling[self.numbers[: len(next(iter(ceiling)))]]


def tool(name: str) -> Path:
    """Out of the PyPI package nvidia-cuda-<name>."""
    for path in importlib.metadata.files(f"nvidia-cuda-{name}") or []:
        if path.name == name:
            return Path(path.locate())
    raise FileNotFoundError(name)


def cuobjdump(*options: str) -> str:
    path = f"{tool('nvdisasm').parent}{os.pathsep}{os.environ['PATH']}"  # cuobjdump runs nvdisasm
    command = [tool("cuobjdump"), *options, LIBRARY]
    return subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "PATH": path}).stdout


@pytest.fixture(scope="session", params=ARCHITECTURES)
def kernels(request: pytest.FixtureRequest) -> dict[str, Kernel]:
    """Every kernel of one architecture, by its mangled name."""
    found = {}
    for mangled, usage in re.findall(
        r"Function (\S+):\n(.*REG:.*)", cuobjdump("--dump-resource-usage", "-arch", request.param)
    ):
        match = re.search(r"\d([a-z][a-z_]*_kernel)(I\S+?EEv)?", mangled)
        assert match, mangled
        numbers = tuple(map(int, re.findall(r"Li(\d+)E", match[2] or "")))
        found[mangled] = Kernel(match[1], numbers, {key: int(n) for key, n in re.findall(r"([A-Z]+):(\d+)", usage)})
    listing = cuobjdump("-sass", "-arch", request.param)
    for mangled, body in re.findall(r"Function : (\S+)\n(.*?)(?=Function : |\Z)", listing, re.DOTALL):
        # An instruction may stand after a predicate such as @!P0.
        found[mangled].instructions.update(
            re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@\S+\s+)?([A-Z]\S*)", body, re.MULTILINE)
        )
    return found


def test_every_kernel_is_known(kernels: dict[str, Kernel]) -> None:
    assert {kernel.name for kernel in kernels.values()} == set(MAX_REGISTERS)
    assert all(kernel.instructions["EXIT"] for kernel in kernels.values())


def test_nothing_spills(kernels: dict[str, Kernel]) -> None:
    for mangled, kernel in kernels.items():
        assert (kernel.usage["STACK"], kernel.usage["LOCAL"]) == (0, 0), f"{mangled}: {kernel.usage}"
        spills = [name for name in kernel.instructions if re.match(r"LDL|STL", name)]
        assert not spills, f"{mangled}: {spills}"


def test_registers_stay_below_their_ceilings(kernels: dict[str, Kernel]) -> None:
    for mangled, kernel in kernels.items():
        assert kernel.usage["REG"] <= kernel.max_registers(), f"{mangled}: {kernel.usage}"


def test_instructions_that_kernels_were_written_for(kernels: dict[str, Kernel]) -> None:
    for mangled, kernel in kernels.items():
        for wanted in INSTRUCTIONS.get(kernel.name, ()):
            assert any(re.match(wanted, name) for name in kernel.instructions), f"{mangled} has no {wanted}"


def test_attention_has_few_instances(kernels: dict[str, Kernel]) -> None:
    instances = [kernel for kernel in kernels.values() if kernel.name.startswith("attention_")]
    assert 0 < len(instances) <= MAX_ATTENTION_INSTANCES


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_needs_only_what_every_machine_has() -> None:
    dynamic, symbols = (
        subprocess.run(["readelf", "-W", option, LIBRARY], check=True, capture_output=True, text=True).stdout
        for option in ("-d", "--dyn-syms")
    )
    needed = {name for name in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic) if not name.startswith("ld-linux")}
    assert needed <= SYSTEM  # neither the driver's libcuda.so.1 nor libcudart.so: the runtime is linked in
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic
    # (GLOBAL or WEAK, ..., where it is defined, name)
    rows = [line.split() for line in symbols.splitlines()]
    exported = {row[7] for row in rows if len(row) >= 8 and row[4] in ("GLOBAL", "WEAK") and row[6] != "UND"}
    assert sorted(name for name in exported if "steploop" in name) == ["steploop_cuda_backend", "steploop_cuda_version"]
    assert [name for name in exported if re.match("cu[A-Z]|cuda[A-Z]", name)] == []


def test_loads_without_a_driver() -> None:
    library = ctypes.CDLL(str(LIBRARY))
    library.steploop_cuda_backend.restype = ctypes.c_void_p
    assert library.steploop_cuda_backend()
