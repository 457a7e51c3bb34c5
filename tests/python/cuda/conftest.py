"""Every test of the CUDA kernels runs in emulation on the CPU, and also on a GPU where there is one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from steploop.weights import load_model, open_checkpoint

ROOT = Path(__file__).parents[3]
ORDERS = {"forward": 0, "reverse": 1, "random": 2}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}),
    "llama-tied-mqa": (
        "Llama",
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64, "tie_word_embeddings": True},
    ),
    "llama-biases": (
        "Llama",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 96,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama-256": ("Llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}),
    "qwen3": ("Qwen3", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where there is no GPU, its half of each test is left out rather than skipped."""
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    left_out = [item for item in items if here in item.path.parents and item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def emulation_library(name: str) -> Path:
    """In STEPLOOP_EMULATED_DIR, or in the build tree that `make test` installed from."""
    folder = os.environ.get("STEPLOOP_EMULATED_DIR")
    found = sorted(Path(folder).glob(name) if folder else (ROOT / "build" / "checked").glob(f"**/{name}"))
    if not found:
        assert not folder, f"no {name} in {folder}"
        assert "STEPLOOP_TEST_WHEELS" not in os.environ, f"no {name} in the build tree of make test"
        pytest.skip("no build tree beside these tests")
    return found[0]


class Ops:
    """The operators, as attributes, and what tests of them share."""

    def __init__(self, namespace: object, device: str, emulation: ctypes.CDLL | None = None) -> None:
        self._namespace = namespace
        self._emulation = emulation
        self.device = device

    def __getattr__(self, name: str) -> object:
        return getattr(self._namespace, name)

    def emulate(self, order: str, seed: int = 0, eager_copies: bool = False) -> None:
        """In which order threads run, and whether an asynchronous copy lands at once or as late as it may."""
        if self._emulation is not None:
            self._emulation.steploop_emulation_set(
                ORDERS[order], ctypes.c_uint64(seed), int(eager_copies), len(os.sched_getaffinity(0))
            )

    def normal(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.device, dtype)

    def integers(self, bound: int, count: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(bound, (count,), generator=generator, dtype=torch.int32).to(self.device)

    def tensor(self, values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    @staticmethod
    def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
        """The norm of the difference over that of what was expected; NaN where got holds one."""
        assert got.shape == expected.shape
        got, expected = got.double().cpu(), expected.double().cpu()
        return float((got - expected).norm() / expected.norm().clamp(min=1e-300))


@pytest.fixture(scope="session", params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "cuda":
        import steploop.ops  # noqa: F401  (loads torch.ops.steploop_cuda)

        return Ops(torch.ops.steploop_cuda, "cuda")
    backend, library = (emulation_library(f"libsteploop_{name}.so") for name in ("cuda_emulated", "emulated_ops"))
    torch.ops.load_library(str(library))
    return Ops(torch.ops.steploop_emulated, "cpu", ctypes.CDLL(str(backend)))


@pytest.fixture
def emulated_device(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Engines with device="cuda" run on the emulated device; the path of its library."""
    library = emulation_library("libsteploop_cuda_emulated.so")
    monkeypatch.setenv("STEPLOOP_CUDA_LIBRARY", str(library))
    ctypes.CDLL(str(library)).steploop_emulation_set(ORDERS["forward"], ctypes.c_uint64(0), 1, 1)
    return library


@pytest.fixture
def fresh_process(emulated_device: Path) -> Callable[[str, dict[str, str]], str]:
    """Runs Python code that must fail, in a process of its own with these environment variables; its error output."""

    def fail(code: str, environment: dict[str, str]) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, timeout=120
        )
        assert done.returncode != 0, done.stdout
        return done.stderr

    return fail


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders with random models of 2 layers, each made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            import transformers

            family, shape = SHAPES[name]
            torch.manual_seed(sum(map(ord, name)))
            config = getattr(transformers, f"{family}Config")(
                **{"vocab_size": 300, "hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 2}
                | {"max_position_embeddings": 1024, "tie_word_embeddings": False, "initializer_range": 0.2}
                | shape
            )
            model = getattr(transformers, f"{family}ForCausalLM")(config)
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if parameter_name.endswith("norm.weight"):
                        parameter.uniform_(0.5, 1.5)
                    elif parameter_name.endswith("bias"):
                        parameter.normal_(0, 0.3)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return get


def load(folder: Path, device: str, dtype: str = "bfloat16") -> Any:
    return load_model(open_checkpoint(str(folder), None), dtype, device)
