"""steploop: a continuous-batching LLM inference engine that you drive one step at a time."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from steploop.config import EngineConfig
from steploop.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InternalError,
    InvalidArgumentError,
    InvalidRequestError,
    LoadTestError,
    ModelLoadError,
    QueueFullError,
    RequestTooLongError,
    SteploopError,
    UnsupportedDeviceError,
    UnsupportedModelError,
)
from steploop.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from steploop.sampling_params import SamplingParams
from steploop.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from steploop.async_engine import AsyncLLMEngine
    from steploop.engine import LLMEngine
    from steploop.llm import LLM

try:
    __version__ = version("steploop")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"


# These need the native core and torch, which take seconds to import: only when they are used.
_LATER = {"AsyncLLMEngine": "async_engine", "LLM": "llm", "LLMEngine": "engine"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"steploop.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "DuplicateRequestError",
    "EngineConfig",
    "EngineDeadError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidRequestError",
    "LLMEngine",
    "LoadTestError",
    "Logprob",
    "ModelLoadError",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "RequestTooLongError",
    "SamplingParams",
    "SteploopError",
    "StructuredOutputsParams",
    "UnsupportedDeviceError",
    "UnsupportedModelError",
    "__version__",
]
