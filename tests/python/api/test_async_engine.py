"""AsyncLLMEngine: the same outputs as from a loop of steps, and what happens when consumers, or the engine, go away."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from steploop import (
    AsyncLLMEngine,
    DuplicateRequestError,
    EngineDeadError,
    InvalidRequestError,
    LLMEngine,
    QueueFullError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)

from .conftest import SETTINGS
from .running import GREEDY, drain

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture
def make_async(tiny_llama: Path) -> Iterator[Callable[..., AsyncLLMEngine]]:
    """Makes engines that are closed after the test."""
    engines: list[AsyncLLMEngine] = []

    def make(**settings: Any) -> AsyncLLMEngine:
        engines.append(AsyncLLMEngine(**{"model": tiny_llama, **SETTINGS, "max_model_len": 256, **settings}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


async def collect(engine: AsyncLLMEngine, prompt: Any, params: SamplingParams, **options: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, **options)]


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


def slow_down(engine: AsyncLLMEngine) -> AsyncLLMEngine:
    """A request of 200 tokens takes a second, so that it still runs when a test comes to it."""
    step = engine.engine.step

    def slow_step() -> list[RequestOutput]:
        time.sleep(0.005)
        return step()

    engine.engine.step = slow_step  # type: ignore[method-assign]
    return engine


def is_idle(engine: AsyncLLMEngine) -> bool:
    stats = engine.engine.stats()
    return not engine.engine.has_unfinished_requests() and stats["num_used_kv_blocks"] == 0


def test_outputs_are_those_of_steps(
    make_async: Callable[..., AsyncLLMEngine], make_engine: Callable[..., LLMEngine]
) -> None:
    params = [SamplingParams(seed=index, max_tokens=5 + index, ignore_eos=True, n=1 + index % 3) for index in range(40)]
    prompts = [[1 + index, 2, 3] * (1 + index % 7) for index in range(40)]

    async def serve() -> list[list[RequestOutput]]:
        engine = make_async()
        return await asyncio.gather(*(collect(engine, *both) for both in zip(prompts, params, strict=True)))

    got = asyncio.run(serve())
    plain = make_engine(max_model_len=256)
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        plain.add_request(str(index), prompt, one)
    expected = drain(plain)
    for index, outputs in enumerate(got):
        assert outputs[-1].outputs == expected[str(index)][-1].outputs
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(lengths)


def test_a_cancelled_consumer_frees_its_blocks(make_async: Callable[..., AsyncLLMEngine]) -> None:
    async def serve() -> None:
        engine = make_async()
        began = asyncio.Event()

        async def consume() -> None:
            async for _ in engine.generate([1, 2, 3], LONG, request_id="gone"):
                began.set()

        task = asyncio.create_task(consume())
        other = asyncio.create_task(collect(engine, [4, 5], GREEDY))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await other)[-1].outputs[0].finish_reason == "length"
        await until(lambda: is_idle(engine))
        # Its id is free again.
        assert (await collect(engine, [1, 2, 3], GREEDY, request_id="gone"))[-1].finished

    asyncio.run(serve())


def test_an_iterator_that_is_left_frees_its_blocks(make_async: Callable[..., AsyncLLMEngine]) -> None:
    async def serve() -> None:
        engine = make_async()
        async for _ in engine.generate([1, 2, 3], LONG):
            break
        await until(lambda: is_idle(engine))

    asyncio.run(serve())


def test_a_slow_consumer_gets_the_newest_output(make_async: Callable[..., AsyncLLMEngine]) -> None:
    async def serve() -> None:
        engine = make_async()
        outputs = []
        async for output in engine.generate([1, 2, 3], LONG):
            outputs.append(output)
            await until(lambda: not engine.engine.has_unfinished_requests())
        assert len(outputs) <= 2, "nothing piles up"
        assert len(outputs[-1].outputs[0].token_ids) == 200

    asyncio.run(serve())


def test_refusals_harm_nobody(make_async: Callable[..., AsyncLLMEngine]) -> None:
    async def serve() -> None:
        engine = slow_down(make_async())
        stream = engine.generate([1, 2, 3], LONG, request_id="a")
        await anext(stream)
        with pytest.raises(DuplicateRequestError):
            await collect(engine, [1], GREEDY, request_id="a")
        with pytest.raises(InvalidRequestError, match="token ids must be in"):
            await collect(engine, [1000], GREEDY)
        with pytest.raises(InvalidRequestError, match="deadline_ms must be"):
            await collect(engine, [1], GREEDY, deadline_ms=-1)
        last = [output async for output in stream][-1]
        assert len(last.outputs[0].token_ids) == 200

    asyncio.run(serve())


def test_abort(make_async: Callable[..., AsyncLLMEngine]) -> None:
    async def serve() -> None:
        engine = slow_down(make_async())
        stream = engine.generate([1, 2, 3], LONG, request_id="a")
        await anext(stream)
        await engine.abort(["a", "unknown"])
        last = [output async for output in stream][-1]
        assert last.outputs[0].finish_reason == "abort"

    asyncio.run(serve())


@pytest.mark.parametrize("timeout", [None, 0.05])
def test_drain(make_async: Callable[..., AsyncLLMEngine], timeout: float | None) -> None:
    async def serve() -> None:
        engine = make_async()
        task = asyncio.create_task(collect(engine, [1, 2, 3], LONG))
        await until(engine.engine.has_unfinished_requests)
        await engine.drain(timeout)
        assert (await task)[-1].outputs[0].finish_reason in (("length",) if timeout is None else ("length", "abort"))
        with pytest.raises(QueueFullError, match="draining"):
            await collect(engine, [1], GREEDY)

    asyncio.run(serve())


def test_closing_ends_those_who_wait(make_async: Callable[..., AsyncLLMEngine]) -> None:
    async def serve() -> None:
        engine = make_async()
        tasks = [asyncio.create_task(collect(engine, [1 + index], LONG)) for index in range(20)]
        await until(engine.engine.has_unfinished_requests)
        await asyncio.to_thread(engine.close)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError | list)
        assert not engine.is_running
        for params in (GREEDY, SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))):
            with pytest.raises(EngineDeadError):
                await collect(engine, [1], params)
        engine.close()

    asyncio.run(serve())


def test_a_step_that_fails_reaches_everyone(
    make_async: Callable[..., AsyncLLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve() -> None:
        engine = slow_down(make_async())

        def fail() -> list[RequestOutput]:
            raise RuntimeError("out of luck")

        stream = engine.generate([1, 2, 3], LONG)
        await anext(stream)
        monkeypatch.setattr(engine.engine, "step", fail)
        with pytest.raises(EngineDeadError, match="out of luck"):
            async for _ in stream:
                pass
        await until(lambda: not engine.is_running)
        with pytest.raises(EngineDeadError, match="out of luck"):
            await collect(engine, [1], GREEDY)

    asyncio.run(serve())


def test_loops_of_several_threads(make_async: Callable[..., AsyncLLMEngine]) -> None:
    engine = make_async()
    results: list[list[RequestOutput]] = []

    async def serve() -> None:
        results.extend(await asyncio.gather(*(collect(engine, [1, 2, 3], GREEDY) for _ in range(5))))

    threads = [threading.Thread(target=lambda: asyncio.run(serve())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    assert all(one[-1].outputs == results[0][-1].outputs for one in results)


def test_a_loop_that_ends_leaves_nothing_behind(make_async: Callable[..., AsyncLLMEngine]) -> None:
    engine = make_async()

    async def leave() -> None:
        await anext(engine.generate([1, 2, 3], LONG))

    asyncio.run(leave())

    async def serve() -> None:
        await until(lambda: is_idle(engine))
        assert (await collect(engine, [1, 2, 3], GREEDY))[-1].finished

    asyncio.run(serve())


def test_an_idle_engine_uses_no_processor_time(make_async: Callable[..., AsyncLLMEngine]) -> None:
    engine = make_async()
    asyncio.run(collect(engine, [1, 2, 3], GREEDY))
    time.sleep(0.2)
    began = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - began < 0.1
