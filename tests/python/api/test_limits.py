"""Limits at the door: QueueFullError, and what it leaves behind (nothing)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import pytest

from steploop import LLMEngine, QueueFullError, RequestTooLongError

from .running import GREEDY, drain, run, tokens

MakeEngine = Callable[..., LLMEngine]


def test_most_requests(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_queued_requests=2)
    expected = tokens(run(engine, [5, 6, 7]))
    engine.add_request("a", [5, 6, 7], dataclasses.replace(GREEDY, n=3))  # one request, however many samples
    engine.add_request("b", [5, 6, 7], GREEDY)
    for _ in range(2):
        with pytest.raises(QueueFullError, match="2 requests wait, max_num_queued_requests is 2"):
            engine.add_request("c", [5, 6, 7], GREEDY)
    assert engine.unfinished_request_ids() == {"a", "b"}
    assert engine.stats()["num_queued_requests"] == 2
    engine.step()  # both start
    assert engine.stats()["num_queued_requests"] == 0
    engine.add_request("c", [5, 6, 7], GREEDY)
    engine.add_request("d", [5, 6, 7], GREEDY)
    with pytest.raises(QueueFullError):
        engine.add_request("e", [5, 6, 7], GREEDY)
    outputs = drain(engine)
    assert outputs.keys() == {"a", "b", "c", "d"}
    assert all(tokens(of_request[-1]) == expected for of_request in outputs.values())


def test_those_that_run_do_not_count(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1, max_num_queued_requests=1)
    engine.add_request("running", [5], GREEDY)
    engine.step()
    engine.add_request("waiting", [5], GREEDY)
    with pytest.raises(QueueFullError, match="1 requests wait"):
        engine.add_request("more", [5], GREEDY)
    engine.abort_request("waiting")
    engine.step()
    engine.add_request("more", [5], GREEDY)
    assert drain(engine)["more"][-1].outputs[0].finish_reason == "length"


def test_most_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_queued_tokens=10)
    engine.add_request("a", [5] * 6, dataclasses.replace(GREEDY, n=2))
    with pytest.raises(QueueFullError, match="6 prompt tokens wait, 5 more exceed max_num_queued_tokens 10"):
        engine.add_request("b", [5] * 5, GREEDY)
    engine.add_request("b", [5] * 4, GREEDY)
    with pytest.raises(QueueFullError, match="10 prompt tokens wait"):
        engine.add_request("c", [5], GREEDY)
    assert engine.stats()["num_queued_tokens"] == 10
    with pytest.raises(RequestTooLongError, match="at most max_num_queued_tokens=10 tokens, got 11"):
        engine.add_request("c", [5] * 11, GREEDY)  # no step would make room
    assert drain(engine).keys() == {"a", "b"}
    engine.add_request("c", [5] * 10, GREEDY)
    assert drain(engine).keys() == {"c"}


def test_from_many_threads(make_engine: MakeEngine) -> None:
    """No more than the limit ever wait, and every request that was accepted ends."""
    engine = make_engine(max_num_seqs=2, max_num_queued_requests=3)
    accepted: list[str] = []
    num_refused = 0
    errors: list[BaseException] = []
    lock = threading.Lock()

    def add(thread: int) -> None:
        nonlocal num_refused
        try:
            for number in range(40):
                name = f"{thread}-{number}"
                try:
                    engine.add_request(name, [5, 6], GREEDY)
                except QueueFullError:
                    with lock:
                        num_refused += 1
                else:
                    with lock:
                        accepted.append(name)
                assert engine.stats()["num_queued_requests"] <= 3
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    finished = []
    while any(thread.is_alive() for thread in threads) or engine.has_unfinished_requests():
        finished += [output.request_id for output in engine.step() if output.finished]
    assert not errors
    assert len(accepted) + num_refused == 160
    assert num_refused > 0
    assert sorted(finished) == sorted(accepted)
