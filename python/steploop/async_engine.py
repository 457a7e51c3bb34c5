"""AsyncLLMEngine: an LLMEngine for asyncio. One thread of its own steps; coroutines wait for their outputs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from steploop.config import EngineConfig
from steploop.engine import LLMEngine
from steploop.errors import EngineDeadError, QueueFullError
from steploop.outputs import RequestOutput
from steploop.prompts import Prompt
from steploop.sampling_params import SamplingParams

_COMPILERS = 16  # threads: more than may wait to compile, so that those whose grammars are known need not


class AsyncLLMEngine:
    """Serves many requests at once to the coroutines of one or several event loops.

        async with AsyncLLMEngine(model="path/to/model") as engine:
            async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    An output has all that its request got so far, so a consumer that is slower than the engine misses none: it gets the
    newest, and nothing piles up behind it. All methods may be called from any thread that runs an event loop.

    Args:
        config: Or its fields as keywords.
        trace: As for LLMEngine.
        on_step: Called after each step with its outputs, in the thread that steps; everybody waits for it.

    Raises:
        As LLMEngine.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        trace: str | Path | None = None,
        on_step: Callable[[list[RequestOutput]], None] | None = None,
        **settings: Any,
    ) -> None:
        self.engine = LLMEngine(config, trace=trace, **settings)
        """What the thread steps. To ask, not to step, drain or close."""
        self._on_step = on_step
        self._compilers = ThreadPoolExecutor(max_workers=_COMPILERS, thread_name_prefix="steploop-grammar")
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards what follows
        self._streams: dict[str, RequestStream] = {}
        self._accepting = True
        self._error: BaseException | None = None
        self._closing = False
        self._wake = threading.Condition(self._lock)  # there is something to step for, or an end
        self._thread = threading.Thread(target=self._run, name="steploop-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Adds a request and yields its outputs, the last one finished. If the consumer goes away before (its task is
        cancelled, the iterator closed), the request is aborted.

        Args:
            request_id: Default: a new one.
            options: `priority`, `tenant`, `cache_salt`, `deadline_ms`, `arrival_time`, as for `LLMEngine.add_request`.

        Raises:
            As `LLMEngine.add_request`, and `EngineDeadError` if the engine fails or is closed meanwhile.
        """
        stream = await self.add_request(prompt, sampling_params, request_id, **options)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> RequestStream:
        """The first half of `generate`: returns once the request is queued. Close the stream that it returns.

        Args:
            As `generate`.

        Raises:
            As `LLMEngine.add_request`.
        """
        request_id = f"request-{next(self._numbers)}" if request_id is None else request_id
        arrival_time = options.pop("arrival_time", None)
        loop = asyncio.get_running_loop()
        # Long texts take long to tokenise, and other coroutines must not wait for it; nor for grammars, which may take
        # much longer, those who tokenise.
        has_grammar = isinstance(sampling_params, SamplingParams) and sampling_params.structured_outputs is not None
        prepare = partial(self.engine.prepare_request, request_id, prompt, sampling_params, **options)
        if not self.is_running:
            raise EngineDeadError(f"the engine has ended: {self._error or 'it is closed'}")
        request = await loop.run_in_executor(self._compilers if has_grammar else None, prepare)
        stream = RequestStream(self, request_id, loop)
        with self._lock:
            if self._error is not None:
                raise EngineDeadError(f"the engine has ended: {self._error}")
            if not self._accepting:
                raise QueueFullError("the engine is draining")
            # Before it is submitted: a step may bring its first output at once. An id in flight is refused by submit.
            known = self._streams.get(request_id)
            self._streams[request_id] = stream
            try:
                self.engine.submit(request, arrival_time=arrival_time)
            except BaseException:
                if known is None:
                    del self._streams[request_id]
                else:
                    self._streams[request_id] = known
                raise
            self._wake.notify()
        return stream

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests early; their consumers get a last output of reason "abort". Unknown ids are ignored."""
        self.engine.abort_request(request_id)

    async def drain(self, timeout: float | None = None) -> None:
        """Accepts nothing more, for good, and waits until every request has ended.

        Args:
            timeout: Seconds, after which what is left is aborted. Default: no limit.
        """
        with self._lock:
            self._accepting = False
        loop = asyncio.get_running_loop()
        ends_at = None if timeout is None else loop.time() + timeout
        while self._thread.is_alive() and (request_ids := self.engine.unfinished_request_ids()):
            if ends_at is not None and loop.time() >= ends_at:
                self.engine.abort_request(request_ids)
                ends_at = None
            await asyncio.sleep(0.005)

    @property
    def is_running(self) -> bool:
        """Whether it takes and serves requests."""
        return self._error is None and not self._closing

    def close(self) -> None:
        """Ends the thread after the step in progress, and frees the model. Consumers that still wait get
        EngineDeadError. May be called again, from any thread."""
        with self._lock:
            self._closing = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.engine.close()
        self._compilers.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> AsyncLLMEngine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.close)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                outputs = self.engine.step()
                if self._on_step is not None:
                    self._on_step(outputs)
                self._deliver(outputs)
            self._end(EngineDeadError("the engine is closed"))
        except BaseException as error:  # whatever it is, those who wait must hear of it
            self._end(error)

    def _wait_for_work(self) -> bool:
        with self._lock:
            while not self._closing and not self.engine.has_unfinished_requests():
                self._wake.wait()
            return not self._closing

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, RequestOutput]]] = {}
        with self._lock:
            for output in outputs:
                if (stream := self._streams.get(output.request_id)) is not None:
                    by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, news in by_loop.items():
            if not _call_in(loop, _put_all, news):
                self.engine.abort_request([output.request_id for _, output in news])  # nobody is left to read them

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            streams = list(self._streams.values())
        for stream in streams:
            _call_in(stream.loop, stream.fail, error)

    def _forget(self, request_id: str, stream: RequestStream) -> None:
        with self._lock:
            if self._streams.get(request_id) is not stream:
                return
            del self._streams[request_id]
        if not stream.finished:
            with contextlib.suppress(EngineDeadError):
                self.engine.abort_request(request_id)


class RequestStream:
    """The outputs of a request, for the coroutine that iterates over them: always the newest one, until it is finished.
    All but `loop` is for that loop's thread."""

    def __init__(self, engine: AsyncLLMEngine, request_id: str, loop: asyncio.AbstractEventLoop) -> None:
        self.request_id = request_id
        self.loop = loop
        self._engine = engine
        self.finished = False
        """The last output has been taken."""
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """In the place of one that was not taken."""
        self._output = output
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """Raises EngineDeadError in the coroutine, unless the last output is there."""
        if self._output is None or not self._output.finished:
            self._error = error
            self._news.set()

    def close(self) -> None:
        """Aborts the request unless its last output has been taken. May be called again."""
        self._engine._forget(self.request_id, self)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise EngineDeadError(str(self._error)) from self._error
        assert self._output is not None
        output, self._output = self._output, None
        self.finished = output.finished
        return output


def _put_all(news: list[tuple[RequestStream, RequestOutput]]) -> None:
    for stream, output in news:
        stream.put(output)


def _call_in(loop: asyncio.AbstractEventLoop, function: Any, *arguments: Any) -> bool:
    """Whether the loop is still there to call it."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:  # closed
        return False
    return True
