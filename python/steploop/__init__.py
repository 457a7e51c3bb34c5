"""steploop: a continuous-batching LLM inference engine that you drive one step at a time."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from steploop.config import EngineConfig
from steploop.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InternalError,
    InvalidArgumentError,
    InvalidRequestError,
    ModelLoadError,
    QueueFullError,
    RequestTooLongError,
    SteploopError,
    UnsupportedDeviceError,
    UnsupportedModelError,
)
from steploop.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from steploop.sampling_params import SamplingParams

if TYPE_CHECKING:
    from steploop.engine import LLMEngine
    from steploop.llm import LLM

try:
    __version__ = version("steploop")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    # These two need the native core and torch, which take seconds to import: only when they are used.
    if name == "LLM":
        from steploop.llm import LLM

        return LLM
    if name == "LLMEngine":
        from steploop.engine import LLMEngine

        return LLMEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "LLM",
    "CompletionOutput",
    "DuplicateRequestError",
    "EngineConfig",
    "EngineDeadError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidRequestError",
    "LLMEngine",
    "Logprob",
    "ModelLoadError",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "RequestTooLongError",
    "SamplingParams",
    "SteploopError",
    "UnsupportedDeviceError",
    "UnsupportedModelError",
    "__version__",
]
