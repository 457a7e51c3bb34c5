"""Adding and aborting from other threads while one thread steps."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from steploop import EngineDeadError, LLMEngine, RequestOutput, SamplingParams

from .running import GREEDY, run, tokens


def test_add_and_abort_while_stepping(engine: LLMEngine) -> None:
    num_threads, num_each = 3, 25
    prompts: list[Any] = [
        [5, 6, 7],
        [10] * 40,
        [11],
        "some text",
        "more text, to be encoded while other text is decoded",
    ]
    alone = [run(engine, prompt) for prompt in prompts]
    expected = {tuple(output.prompt_token_ids): tokens(output) for output in alone}
    aborted: set[str] = set()
    errors: list[BaseException] = []

    def add(thread: int) -> None:
        rng = random.Random(thread)
        try:
            for number in range(num_each):
                name = f"{thread}-{number}"
                engine.add_request(name, rng.choice(prompts), GREEDY)
                if rng.random() < 0.3:
                    aborted.add(name)
                    engine.abort_request(name)
                engine.stats()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    last: dict[str, RequestOutput] = {}
    while any(thread.is_alive() for thread in threads) or engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id not in last or not last[output.request_id].finished
            last[output.request_id] = output
    assert not errors
    assert len(last) == num_threads * num_each
    for name, output in last.items():
        assert output.finished
        whole = expected[tuple(output.prompt_token_ids)]
        if output.outputs[0].finish_reason == "abort":
            assert name in aborted
            assert tokens(output) == whole[: len(tokens(output))]
        else:
            assert tokens(output) == whole
    assert engine.unfinished_request_ids() == set()
    assert engine.stats()["num_used_kv_blocks"] == 0


def test_close_while_stepping(engine: LLMEngine) -> None:
    engine.add_request("a", [5], SamplingParams(max_tokens=400, ignore_eos=True))
    closer = threading.Timer(0.05, engine.close)
    closer.start()

    def step_forever() -> None:
        while True:
            engine.step()

    with pytest.raises(EngineDeadError):
        step_forever()
    closer.join()
    assert not engine.has_unfinished_requests()
