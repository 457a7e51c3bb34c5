"""LLMEngine: a model, its KV cache and the batching loop; one call of step() is one iteration."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Integral, Real
from types import TracebackType
from typing import Any

from steploop import _C
from steploop.config import EngineConfig, size_kv_cache
from steploop.devices import check_device, kv_cache_memory
from steploop.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InvalidArgumentError,
    InvalidRequestError,
    RequestTooLongError,
    UnsupportedDeviceError,
)
from steploop.interrupts import deferred_interrupts
from steploop.outputs import RequestOutput
from steploop.request_state import RequestState
from steploop.sampling_params import SamplingParams
from steploop.tokenizer import Tokenizer
from steploop.weights import TokenizerFiles, find_tokenizer, load_model, open_checkpoint, resolve_dtype

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or {"prompt_token_ids": [...], "prompt": "the text they stand for, optional"}."""


class LLMEngine:
    """Serves many requests at once, one step at a time.

        engine = LLMEngine(EngineConfig(model="path/to/model"))     # or LLMEngine(model="path/to/model")
        engine.add_request("a", "Once upon a time", SamplingParams(max_tokens=32))
        while engine.has_unfinished_requests():
            for output in engine.step():
                ...

    `add_request` and `abort_request` may be called from any thread while one thread calls `step`. A KeyboardInterrupt
    in `step` loses nothing: call it again.

    Raises:
        InvalidArgumentError: a setting that cannot be, alone or with this model.
        ModelLoadError: the model's files are missing or damaged.
        UnsupportedModelError: the model needs something the engine lacks.
        UnsupportedDeviceError: no such device here.
    """

    def __init__(self, config: EngineConfig | None = None, **settings: Any) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise InvalidArgumentError(f"config must be an EngineConfig, got {config!r}; use LLMEngine(model=...)")
        if config is not None and settings:
            raise InvalidArgumentError(f"give an EngineConfig or settings, not both; got {', '.join(settings)} as well")
        self.config = EngineConfig(**settings) if config is None else config
        checkpoint = open_checkpoint(self.config.model, self.config.revision)
        dtype = resolve_dtype(self.config.dtype, checkpoint, self.config.device)
        kv_cache_dtype = dtype if self.config.kv_cache_dtype == "auto" else self.config.kv_cache_dtype
        spec = checkpoint.spec
        # Before the weights are read, so that a setting that cannot be is refused at once.
        check_device(self.config.device, dtype, kv_cache_dtype)
        matmul = 0 if self.config.batch_invariant else _torch_matmul()
        size = size_kv_cache(
            self.config,
            spec,
            bytes_per_token=_C.Engine.kv_bytes_per_token(spec.to_native(), kv_cache_dtype),
            memory=kv_cache_memory(self.config, spec, dtype, kv_cache_dtype),
        )
        self.tokenizer = self._load_tokenizer(checkpoint.tokenizer)
        self.vocab_size = spec.vocab_size
        self.max_model_len = size.max_model_len
        """Longest sequence, prompt and output together, in tokens."""
        self.dtype = dtype
        """The compute type in use."""
        self._sampling_defaults = checkpoint.generation.sampling
        self._native = _C.Engine(
            load_model(checkpoint, dtype, self.config.device),
            max_model_len=size.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            block_size=self.config.block_size,
            num_kv_blocks=size.num_kv_blocks,
            kv_cache_dtype=kv_cache_dtype,
            num_threads=self.config.num_threads or 0,
            seed=self.config.seed,
            scheduling_policy=self.config.scheduling_policy,
            eos_token_ids=self._eos_token_ids(checkpoint.generation.eos_token_ids),
            matmul=matmul,
        )
        self._torch_stream = _torch_stream(self._native) if not self.config.batch_invariant else nullcontext
        self._lock = threading.Lock()  # guards _requests
        self._requests: dict[str, RequestState] = {}
        # What step() is about to return; kept here until then, so that an interrupt cannot lose it.
        self._outputs: dict[str, RequestOutput] = {}

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
    ) -> None:
        """Queues a request; it joins the batch at a coming step.

        Args:
            request_id: Any string that no request in flight has.
            prompt: See `Prompt`.
            sampling_params: Default: `SamplingParams()`.
            arrival_time: Seconds on the clock of `time.monotonic()`; default: now.

        Raises:
            InvalidRequestError: an empty or ill-typed prompt, token ids outside the vocabulary, another argument of the
                wrong type or range.
            RequestTooLongError: a prompt longer than `max_model_len`.
            DuplicateRequestError: the id is in flight.
            EngineDeadError: the engine is closed.
        """
        self.submit(self.prepare_request(request_id, prompt, sampling_params), arrival_time=arrival_time)

    def prepare_request(
        self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> RequestState:
        """The first half of `add_request`: tokenises and checks, and changes nothing. Raises as `add_request` does."""
        _check_request_id(request_id)
        if sampling_params is not None and not isinstance(sampling_params, SamplingParams):
            raise InvalidRequestError(f"sampling_params must be SamplingParams, got {sampling_params!r}")
        text, token_ids = self._parse_prompt(prompt)
        if len(token_ids) > self.max_model_len:
            raise RequestTooLongError(
                f"the prompt must have at most max_model_len={self.max_model_len} tokens, got {len(token_ids)}"
            )
        params = (sampling_params or SamplingParams()).with_defaults(self._sampling_defaults)
        return RequestState(request_id, text, token_ids, params, self.tokenizer)

    def submit(self, request: RequestState, *, arrival_time: float | None = None) -> None:
        """The second half of `add_request`: queues a prepared request. Raises as `add_request` does."""
        request_id = request.request_id
        if arrival_time is not None:
            arrival_time = _checked_time(arrival_time)
        with deferred_interrupts(), self._lock:
            if request_id in self._requests:
                raise DuplicateRequestError(f"request_id must be unique among requests in flight, got {request_id!r}")
            # Known here before it is known there: a step in another thread may bring its first token at once.
            self._requests[request_id] = request
            try:
                self._native.add_request(request_id, request.prompt_token_ids, request.params.to_native(), arrival_time)
            except BaseException:
                del self._requests[request_id]
                raise

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Ends requests early; the next step reports each finished with reason "abort". Unknown ids are ignored.

        Raises:
            InvalidRequestError: what cannot be a request id, or a list of them; then none is aborted.
            EngineDeadError: the engine is closed.
        """
        if not isinstance(request_id, Iterable):
            raise InvalidRequestError(f"request_id must be a string or a list of strings, got {request_id!r}")
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for one in request_ids:
            _check_request_id(one)
        for one in request_ids:
            self._native.abort_request(one)

    def step(self) -> list[RequestOutput]:
        """Runs one iteration: schedules, computes, samples. Other Python threads run meanwhile.

        Returns:
            One output for each request that got tokens or ended.

        Raises:
            EngineDeadError: the engine is closed, or failed for good; its requests are lost.
        """
        with deferred_interrupts():
            try:
                with self._torch_stream():
                    step_outputs = self._native.step()
            except EngineDeadError:
                with self._lock:
                    self._requests.clear()
                raise
            for step_output in step_outputs:
                self._take_in(step_output)
        outputs = list(self._outputs.values())
        self._outputs = {}
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether another step has something to bring."""
        return bool(self._outputs) or self._native.has_unfinished_requests()

    def unfinished_request_ids(self) -> set[str]:
        """Ids of the requests waiting or running."""
        with self._lock:
            return set(self._requests)

    def stats(self) -> dict[str, Any]:
        """Counters of the queue, the KV cache and the last step, and microseconds spent in each phase of a step.

        On CUDA the forward pass is only enqueued in `forward_us`; `sample_us` has the wait for all of it.
        """
        stats: dict[str, Any] = self._native.stats()
        return stats

    def close(self) -> None:
        """Frees the model and the KV cache. May be called again; to add, abort or step then raises EngineDeadError."""
        self._native.close()
        with self._lock:
            self._requests.clear()
        self._outputs = {}

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _take_in(self, step_output: _C.StepOutput) -> None:
        request_id = step_output.request_id
        with self._lock:
            request = self._requests.get(request_id)
        if request is None:
            return
        try:
            output = request.update(step_output)
        except Exception:
            # One request's text must not cost the others their tokens of this step.
            logger.exception("request %r failed while its output was made", request_id)
            self._native.abort_request(request_id)
            output = request.output(step_output, "error")
        if output.finished:
            with self._lock:
                del self._requests[request_id]
        self._outputs[request_id] = output

    def _load_tokenizer(self, from_model: TokenizerFiles | None) -> Tokenizer | None:
        if self.config.tokenizer is not None:
            return Tokenizer.load(find_tokenizer(self.config.tokenizer))
        return None if from_model is None else Tokenizer.load(from_model)

    def _eos_token_ids(self, from_model: tuple[int, ...]) -> list[int]:
        """The generation config's, and the tokenizer's: fine-tuned models often change only the latter."""
        from_tokenizer = None if self.tokenizer is None else self.tokenizer.eos_token_id
        if from_tokenizer is None or not 0 <= from_tokenizer < self.vocab_size:
            return list(from_model)
        return list(dict.fromkeys([*from_model, from_tokenizer]))

    def _parse_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text or None, token ids), both checked."""
        text: Any = None
        token_ids: Any = prompt
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or not prompt:
                raise InvalidRequestError(
                    f"a prompt's keys must be prompt_token_ids or prompt, got {sorted(map(str, prompt))}"
                )
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        elif isinstance(prompt, str):
            text, token_ids = prompt, None
        if text is not None and not isinstance(text, str):
            raise InvalidRequestError(f"a prompt's text must be a string, got {text!r}")
        if token_ids is None:
            token_ids = self._encode(text)
        if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
            raise InvalidRequestError(f"a prompt must be a string or a list of token ids, got {token_ids!r}")
        if not token_ids:
            raise InvalidRequestError("the prompt must have at least one token, got none")
        return text, [self._checked_token(token_id) for token_id in token_ids]

    def _checked_token(self, token_id: object) -> int:
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise InvalidRequestError(f"token ids must be integers, got {token_id!r}")
        number = int(token_id)
        if not 0 <= number < self.vocab_size:
            raise InvalidRequestError(f"token ids must be in 0..{self.vocab_size - 1}, got {number}")
        return number

    def _encode(self, text: str | None) -> list[int]:
        if text is None:
            raise InvalidRequestError("a prompt must have a text or token ids, got neither")
        if self.tokenizer is None:
            raise InvalidRequestError(
                f"{self.config.model} has no tokenizer: give token ids, or set EngineConfig.tokenizer"
            )
        return self.tokenizer.encode(text)


def _torch_matmul() -> int:
    """The address of torch's matmul: cuBLAS, on CUDA.

    Raises:
        UnsupportedDeviceError: torch has no CUDA here.
    """
    import torch

    import steploop.ops  # noqa: F401  (loads the operators)

    if not torch.cuda.is_available():
        raise UnsupportedDeviceError(
            f"batch_invariant=False needs a torch that runs on CUDA, torch {torch.__version__} does not here; leave "
            "batch_invariant as it is, or install another torch"
        )
    return int(torch.ops.steploop_cuda.matmul_address())


def _torch_stream(native: _C.Engine) -> Callable[[], AbstractContextManager[Any]]:
    """Within it, torch enqueues on the stream on which the engine's steps run."""
    import torch

    if not torch.cuda.is_available():  # tests put another matmul in torch's place
        return nullcontext
    stream = torch.cuda.ExternalStream(native.cuda_stream(), device=0)
    return lambda: torch.cuda.stream(stream)


def _checked_time(arrival_time: object) -> float:
    seconds = math.nan
    if not isinstance(arrival_time, bool) and isinstance(arrival_time, Real):
        with contextlib.suppress(OverflowError):
            seconds = float(arrival_time)
    # More seconds would overflow the engine's microseconds; no clock gets there.
    if not 0 <= seconds < 1e12:
        raise InvalidRequestError(
            f"arrival_time must be seconds on the clock of time.monotonic(), >= 0, got {arrival_time!r}"
        )
    return seconds


def _check_request_id(request_id: object) -> None:
    if not isinstance(request_id, str) or not _is_unicode(request_id):
        raise InvalidRequestError(f"request_id must be a string of valid Unicode, got {request_id!r}")


def _is_unicode(text: str) -> bool:
    """Whether `text` is free of halves of surrogate pairs, which no encoding can express."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
