"""drain(): nobody new is let in, all that is in flight ends."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from steploop import EngineDeadError, InvalidArgumentError, LLMEngine, QueueFullError, RequestOutput

from .running import GREEDY, run, tokens

MakeEngine = Callable[..., LLMEngine]


class HookedNative:
    """The native engine; `hook(number of the step)` runs in the middle of each step."""

    def __init__(self, native: Any, hook: Callable[[int], None]) -> None:
        self._native = native
        self._hook = hook
        self._num_steps = 0

    def step(self) -> Any:
        self._num_steps += 1
        self._hook(self._num_steps)
        return self._native.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


def hook(engine: LLMEngine, function: Callable[[int], None]) -> None:
    engine._native = HookedNative(engine._native, function)  # type: ignore[assignment]


def test_runs_to_the_end(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=2)
    expected = tokens(run(engine, [5, 6, 7]))
    assert engine.drain() == []
    for name in "abcd":
        engine.add_request(name, [5, 6, 7], GREEDY)
    engine.step()
    outputs = engine.drain()
    assert sorted(output.request_id for output in outputs) == list("abcd")
    assert all(output.finished and tokens(output) == expected for output in outputs)
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    assert tokens(run(engine, [5, 6, 7])) == expected  # accepts again


def test_accepts_nobody_meanwhile(engine: LLMEngine) -> None:
    refused = []

    def add(step: int) -> None:
        with pytest.raises(QueueFullError, match="the engine is draining"):
            engine.add_request(f"new-{step}", [5], GREEDY)
        refused.append(step)

    engine.add_request("a", [5, 6, 7], GREEDY)
    hook(engine, add)
    assert [output.request_id for output in engine.drain()] == ["a"]
    assert len(refused) == 12
    assert engine.unfinished_request_ids() == set()


def test_timeout(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    expected = tokens(run(engine, [5, 6, 7]))
    for name in ("running", "waiting"):
        engine.add_request(name, [5, 6, 7], GREEDY)
    for _ in range(3):
        engine.step()
    by_id = {output.request_id: output for output in engine.drain(timeout=0)}
    assert by_id.keys() == {"running", "waiting"}
    assert all(output.finished and output.outputs[0].finish_reason == "abort" for output in by_id.values())
    assert (tokens(by_id["running"]), tokens(by_id["waiting"])) == (expected[:3], [])
    assert engine.stats()["num_used_kv_blocks"] == 0
    engine.add_request("a", [5, 6, 7], GREEDY)
    [output] = engine.drain(timeout=3600)
    assert tokens(output) == expected


@pytest.mark.parametrize("timeout", [-1, math.nan, math.inf, "5", True])
def test_bad_timeout(engine: LLMEngine, timeout: Any) -> None:
    engine.add_request("a", [5], GREEDY)
    with pytest.raises(InvalidArgumentError, match="timeout must be seconds >= 0, or None, got"):
        engine.drain(timeout)
    engine.add_request("b", [5], GREEDY)
    assert len(engine.drain()) == 2


def test_interrupt_loses_nothing(engine: LLMEngine) -> None:
    """Short ones end before the interrupt, long ones after it."""
    expected = tokens(run(engine, [5, 6, 7]))

    def interrupt(step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt

    for number in range(8):
        engine.add_request(str(number), [5, 6, 7], dataclasses.replace(GREEDY, max_tokens=1 + number))
    hook(engine, interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.drain()
    engine.add_request("0", [5, 6, 7], GREEDY)  # accepts again, also an id whose end has not been told yet
    outputs = engine.drain()
    assert [output.request_id for output in outputs].count("0") == 2
    assert sorted(len(tokens(output)) for output in outputs) == sorted([*range(1, 9), 12])
    assert all(output.finished and tokens(output) == expected[: len(tokens(output))] for output in outputs)


def test_beside_other_threads(make_engine: MakeEngine) -> None:
    """One thread steps, three add, one drains again and again: each accepted request ends exactly once."""
    engine = make_engine(max_num_seqs=4)
    expected = tokens(run(engine, [5, 6, 7]))
    accepted: list[str] = []
    ended: list[RequestOutput] = []
    num_refused = 0
    errors: list[BaseException] = []
    lock = threading.Lock()
    adding = threading.Event()
    adding.set()

    def guarded(function: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            try:
                function()
            except BaseException as error:
                errors.append(error)

        return call

    def add(thread: int) -> Callable[[], None]:
        def call() -> None:
            nonlocal num_refused
            number = 0
            while adding.is_set():
                number += 1
                try:
                    engine.add_request(f"{thread}-{number}", [5, 6, 7], GREEDY)
                except QueueFullError as error:
                    assert "draining" in str(error)
                    with lock:
                        num_refused += 1
                else:
                    with lock:
                        accepted.append(f"{thread}-{number}")
                time.sleep(0.001)

        return call

    def step() -> None:
        while adding.is_set():
            outputs = engine.step()
            with lock:
                ended.extend(output for output in outputs if output.finished)

    threads = [threading.Thread(target=guarded(one)) for one in (add(1), add(2), add(3), step)]
    for thread in threads:
        thread.start()
    try:
        gives_up = time.monotonic() + 60
        num_drains = 0
        while (num_drains < 10 or num_refused == 0) and not errors and time.monotonic() < gives_up:
            if not engine.has_unfinished_requests():
                time.sleep(0.0005)  # there must be something to drain
                continue
            outputs = engine.drain()
            num_drains += 1
            with lock:
                ended.extend(outputs)
    finally:
        adding.clear()
        for thread in threads:
            thread.join()
    ended += engine.drain()
    assert not errors
    assert num_drains >= 10
    assert num_refused > 0
    assert all(output.finished and tokens(output) == expected for output in ended)
    assert sorted(output.request_id for output in ended) == sorted(accepted)


def test_closed_meanwhile(engine: LLMEngine) -> None:
    def close(step: int) -> None:
        if step == 3:
            engine.close()

    engine.add_request("a", [5, 6, 7], GREEDY)
    hook(engine, close)
    with pytest.raises(EngineDeadError, match="closed"):
        engine.drain()
    with pytest.raises(EngineDeadError, match="closed"):
        engine.drain()
