"""LLMEngine: a model, its KV cache and the batching loop; one call of step() is one iteration."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from steploop import _C
from steploop.checks import as_finite, check_trace_path
from steploop.config import EngineConfig
from steploop.devices import check_device, size_memory, torch_matmul, torch_stream
from steploop.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InvalidArgumentError,
    InvalidRequestError,
)
from steploop.interrupts import deferred_interrupts
from steploop.outputs import RequestOutput
from steploop.preparation import Preparation
from steploop.prompts import Prompt
from steploop.request_options import RequestOptions, check_request_id, checked_time
from steploop.request_state import RequestState
from steploop.sampling_params import SamplingParams
from steploop.scheduling import native_settings
from steploop.tokenizer import Tokenizer
from steploop.weights import (
    TokenizerFiles,
    find_tokenizer,
    load_model,
    open_checkpoint,
    resolve_dtype,
    resolve_quantization,
    weight_bytes,
)

logger = logging.getLogger(__name__)


class LLMEngine:
    """Serves many requests at once, one step at a time.

        engine = LLMEngine(EngineConfig(model="path/to/model"))     # or LLMEngine(model="path/to/model")
        engine.add_request("a", "Once upon a time", SamplingParams(max_tokens=32))
        while engine.has_unfinished_requests():
            for output in engine.step():
                ...

    Every method may be called from any thread; usually one steps while others add and abort. A KeyboardInterrupt in
    `step` loses nothing: call it again.

    Args:
        config: Or its fields as keywords.
        trace: A file to write what happens to, step by step, in Chrome's trace format (for ui.perfetto.dev): a lane for
            each request, and counters. Overwritten. Whole once the engine is closed.

    Raises:
        InvalidArgumentError: a setting that cannot be, alone or with this model; a trace that cannot be written.
        ModelLoadError: the model's files are missing or damaged.
        UnsupportedModelError: the model needs something the engine lacks.
        UnsupportedDeviceError: no such device here.
    """

    def __init__(self, config: EngineConfig | None = None, *, trace: str | Path | None = None, **settings: Any) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise InvalidArgumentError(f"config must be an EngineConfig, got {config!r}; use LLMEngine(model=...)")
        if config is not None and settings:
            raise InvalidArgumentError(f"give an EngineConfig or settings, not both; got {', '.join(settings)} as well")
        self.config = EngineConfig(**settings) if config is None else config
        if trace is not None:
            check_trace_path(trace)
        checkpoint = open_checkpoint(self.config.model, self.config.revision)
        dtype = resolve_dtype(self.config.dtype, checkpoint, self.config.device)
        quantization = resolve_quantization(self.config.quantization, checkpoint, self.config.device)
        kv_cache_dtype = dtype if self.config.kv_cache_dtype == "auto" else self.config.kv_cache_dtype
        # Before the weights are read, so that a setting that cannot be is refused at once.
        check_device(self.config.device, dtype, kv_cache_dtype)
        matmul = 0 if self.config.batch_invariant else torch_matmul()
        weights = weight_bytes(checkpoint.spec, dtype, quantization)
        size, num_host_blocks = size_memory(self.config, checkpoint.spec, weights, dtype, kv_cache_dtype)
        self.tokenizer = self._load_tokenizer(checkpoint.tokenizer)
        self.vocab_size = checkpoint.spec.vocab_size
        self.max_model_len = size.max_model_len
        """Longest sequence, prompt and output together, in tokens."""
        self.dtype = dtype
        """The compute type in use."""
        self.quantization = quantization
        """How linear weights are stored; None: in the compute type."""
        self.kv_cache_dtype = kv_cache_dtype
        """The KV cache's type in use."""
        eos_token_ids = self._eos_token_ids(checkpoint.generation.eos_token_ids)
        self._preparation = Preparation(
            self.config,
            checkpoint.generation.sampling,
            self.tokenizer,
            self.vocab_size,
            self.max_model_len,
            eos_token_ids,
        )
        self._native = _C.Engine(
            load_model(checkpoint, dtype, self.config.device, quantization),
            max_model_len=size.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            block_size=self.config.block_size,
            num_kv_blocks=size.num_kv_blocks,
            num_host_blocks=num_host_blocks,
            kv_cache_dtype=kv_cache_dtype,
            num_threads=self.config.num_threads or 0,
            seed=self.config.seed,
            eos_token_ids=eos_token_ids,
            matmul=matmul,
            trace="" if trace is None else str(trace),
            profile=self.config.profile,
            **native_settings(self.config),
        )
        self._torch_stream = torch_stream(self._native) if not self.config.batch_invariant else nullcontext
        self._lock = threading.Lock()  # guards _requests and _num_drains
        self._requests: dict[str, RequestState] = {}
        self._num_drains = 0  # calls of drain() in progress
        self._step_lock = threading.Lock()  # guards _outputs, and keeps the steps of several threads in order
        # What step() is about to return; kept here until then, so that an interrupt cannot lose it.
        self._outputs: dict[RequestState, RequestOutput] = {}

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        deadline_ms: float | None = None,
    ) -> None:
        """Queues a request; it joins the batch at a coming step.

        Args:
            request_id: Any string that no request in flight has.
            prompt: See `steploop.prompts.Prompt`.
            sampling_params: Default: `SamplingParams()`.
            arrival_time: Seconds on the clock of `time.monotonic()`; default: now. What latencies and deadlines are
                counted from; a time ahead delays nothing.
            priority: With `queue_order="priority"`: the lower goes first; may be negative.
            tenant: Whose request it is. With `queue_order="fair"` tenants take turns.
            cache_salt: Cached prefixes are shared only among requests of the same salt. Without one, among those of the
                same tenant, or among all that have neither: how fast an answer begins tells what others have asked.
            deadline_ms: Milliseconds after its arrival at which the request ends with reason "timeout" and the tokens
                it has by then, wherever it is. Default: none.

        Raises:
            InvalidRequestError: an empty or ill-typed prompt, token ids outside the vocabulary, more samples than
                `max_num_seqs`, another argument of the wrong type or range; structured outputs that cannot be compiled.
            RequestTooLongError: a prompt that leaves no room for a token within `max_model_len`, or longer than
                `max_num_queued_tokens`.
            DuplicateRequestError: the id is in flight.
            QueueFullError: as many requests or tokens wait as may (`max_num_queued_requests`, `max_num_queued_tokens`),
                or the engine is draining. Try again after a step.
            EngineDeadError: the engine is closed.
        """
        request = self.prepare_request(
            request_id,
            prompt,
            sampling_params,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            deadline_ms=deadline_ms,
        )
        self.submit(request, arrival_time=arrival_time)

    def prepare_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        deadline_ms: float | None = None,
    ) -> RequestState:
        """The first half of `add_request`: tokenises and checks, and changes nothing. Raises as `add_request` does."""
        options = RequestOptions(priority=priority, tenant=tenant, cache_salt=cache_salt, deadline_ms=deadline_ms)
        return self._preparation.prepare(request_id, prompt, sampling_params, options)

    def submit(self, request: RequestState, *, arrival_time: float | None = None) -> None:
        """The second half of `add_request`: queues a prepared request. Raises as `add_request` does."""
        request_id, options = request.request_id, request.options
        if arrival_time is not None:
            arrival_time = checked_time(arrival_time)
        with deferred_interrupts(), self._lock:
            if request_id in self._requests:
                raise DuplicateRequestError(f"request_id must be unique among requests in flight, got {request_id!r}")
            # Known here before it is known there: a step in another thread may bring its first token at once.
            self._requests[request_id] = request
            try:
                self._native.add_request(
                    request_id,
                    request.prompt_token_ids,
                    request.native_params,
                    arrival_time=arrival_time,
                    priority=options.priority,
                    tenant=options.tenant,
                    cache_salt=options.cache_salt,
                    deadline_ms=options.deadline_ms,
                    token_bitmask=None if request.grammar is None else request.grammar.bitmask,
                )
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
            check_request_id(one)
        for one in request_ids:
            self._native.abort_request(one)

    def step(self) -> list[RequestOutput]:
        """Runs one iteration: schedules, computes, samples. Other Python threads run meanwhile.

        Returns:
            One output for each request that got tokens or ended.

        Raises:
            EngineDeadError: the engine is closed, or failed for good; its requests are lost.
        """
        self._advance()
        return self._take_outputs()

    def drain(self, timeout: float | None = None) -> list[RequestOutput]:
        """Steps until every request in flight has ended. Meanwhile none is accepted: `add_request` raises
        QueueFullError. Afterwards they are again.

        Args:
            timeout: Seconds, after which what is left is aborted. Default: no limit.

        Returns:
            The last output of each request (if another thread steps as well, of those that did not end there).

        Raises:
            InvalidArgumentError: a timeout that is no finite number >= 0.
            EngineDeadError: as `step`.
            KeyboardInterrupt: Ctrl-C. Nothing is lost: `step` or `drain` again.
        """
        seconds = as_finite(timeout)
        if timeout is not None and (seconds is None or seconds < 0):
            raise InvalidArgumentError(f"timeout must be seconds >= 0, or None, got {timeout!r}")
        ends_at = None if seconds is None else time.monotonic() + seconds
        self._count_drains(1)
        try:
            while self._native.has_unfinished_requests():
                if ends_at is not None and time.monotonic() >= ends_at:
                    self.abort_request(self.unfinished_request_ids())
                self._advance()
        except BaseException:
            with contextlib.suppress(EngineDeadError):  # one of step says more
                self._count_drains(-1)
            raise
        return self._take_outputs(lambda: self._count_drains(-1))

    def has_unfinished_requests(self) -> bool:
        """Whether another step has something to bring."""
        return bool(self._outputs) or self._native.has_unfinished_requests()

    def unfinished_request_ids(self) -> set[str]:
        """Ids of the requests waiting or running."""
        with self._lock:
            return set(self._requests)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; for weights that have changed, and for measurements.

        Raises:
            EngineDeadError: the engine is closed.
        """
        self._native.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        """Counters of the queue, the KV cache and the last step, and microseconds spent in each phase of a step.

        On CUDA the forward pass is only enqueued in `forward_us`; `sample_us` has the wait for all of it.
        """
        stats: dict[str, Any] = self._native.stats()
        return stats

    def iteration_stats(self) -> list[dict[str, Any]]:
        """What each iteration since the last call did, oldest first; at most the last `iteration_stats_capacity`.

        Requests queued, active, scheduled and paused (preempted), tokens of prompts and of decodes, KV blocks, tokens
        reused, recomputed and swapped, and how long the iteration and its phases took.
        """
        iterations: list[dict[str, Any]] = self._native.iteration_stats()
        return iterations

    def profile(self) -> dict[str, Any]:
        """What the operations of a step took since the last call, of an engine made with `profile=True`.

        Returns:
            "num_runs": steps, and "run_us": how long their forward pass and sampling took, by the thread that calls
            `step`; "operations": by name, how often it ran ("num_calls"), where the threads met in it ("num_barriers"),
            and for each thread the microseconds it worked ("working_us") and waited for others ("waiting_us"). What is
            missing in a thread's sum to `run_us` went by before it started or after it had ended.

        Raises:
            InvalidArgumentError: the engine was made without `profile=True`.
            EngineDeadError: the engine is closed, or has failed.
        """
        profile: dict[str, Any] = self._native.profile()
        return profile

    def close(self) -> None:
        """Frees the model and the KV cache. May be called again; to add, abort or step then raises EngineDeadError."""
        was_open = not self._native.closed
        self._native.close()
        self._preparation.close()
        if was_open and (trace_error := self.stats()["trace_error"]):
            logger.warning("the trace is not whole: %s", trace_error)
        with self._lock:
            self._requests.clear()
            self._outputs = {}

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self) -> None:
        """One iteration; its outputs go to `_outputs`."""
        with deferred_interrupts(), self._step_lock:
            try:
                with self._torch_stream():
                    step_outputs = self._native.step()
            except EngineDeadError:
                with self._lock:
                    self._requests.clear()
                self._outputs = {}
                raise
            by_request: dict[str, list[_C.StepOutput]] = {}
            for step_output in step_outputs:
                by_request.setdefault(step_output.request_id, []).append(step_output)
            for request_id, of_request in by_request.items():
                self._take_in(request_id, of_request)

    def _take_outputs(self, then: Callable[[], None] | None = None) -> list[RequestOutput]:
        """Takes what steps left, then calls `then`."""
        taken: dict[RequestState, RequestOutput] = {}
        try:
            with self._step_lock:
                taken, self._outputs = self._outputs, {}
            if then is not None:
                then()  # raises if the engine was closed, or failed, in another thread
            return list(taken.values())
        except EngineDeadError:
            raise
        except BaseException:  # an interrupt, which must lose nothing
            self._outputs = {**taken, **self._outputs}
            raise

    def _count_drains(self, change: int) -> None:
        with deferred_interrupts(), self._lock:
            self._num_drains += change
            self._native.set_accepting(self._num_drains == 0)

    def _take_in(self, request_id: str, step_outputs: list[_C.StepOutput]) -> None:
        with self._lock:
            request = self._requests.get(request_id)
        if request is None:  # the engine was closed meanwhile
            return
        if not request.ended:
            try:
                output = request.update(step_outputs)
            except Exception:
                # One request's text must not cost the others their tokens of this step.
                logger.exception("request %r failed while its output was made", request_id)
                self._native.abort_request(request_id)
                output = request.fail()
            for index in request.stopped:
                self._native.abort_request(request_id, index)
            with self._lock:
                if self._requests.get(request_id) is not request:  # closed just now
                    return
                self._outputs[request] = output
        # Not before: until then the native engine knows the id, and a new request of that id is another one.
        if any(step_output.request_finished for step_output in step_outputs):
            with self._lock:
                self._requests.pop(request_id, None)

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
