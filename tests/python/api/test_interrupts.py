"""Ctrl-C during step() and generate(): nothing is lost, nothing is left behind, the engine goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from steploop import LLM, LLMEngine
from steploop.interrupts import deferred_interrupts

from .conftest import SETTINGS
from .running import GREEDY, run


class InterruptedNative:
    """The native engine, with a Ctrl-C in the middle of some of its steps."""

    def __init__(self, native: Any, steps: set[int]) -> None:
        self._native = native
        self._steps = steps
        self._num_steps = 0

    def step(self) -> Any:
        self._num_steps += 1
        if self._num_steps in self._steps:
            signal.raise_signal(signal.SIGINT)
        return self._native.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


def test_step_loses_nothing(engine: LLMEngine) -> None:
    expected = run(engine, "hello")
    engine._native = InterruptedNative(engine._native, {1, 4, 12, 13})  # type: ignore[assignment]
    for name in "ab":
        engine.add_request(name, "hello", GREEDY)
    last = {}
    num_interrupts = 0
    while engine.has_unfinished_requests():
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
            continue
        for output in outputs:
            last[output.request_id] = output
    assert num_interrupts == 4
    for output in last.values():
        assert output.outputs == expected.outputs
    assert last.keys() == {"a", "b"}


def test_generate_can_be_used_again(tiny_llama: Path) -> None:
    with LLM(tiny_llama, **SETTINGS) as llm:
        expected = [output.outputs for output in llm.generate(["a", "b"], GREEDY)]
        native = llm.engine._native
        for step in (1, 2, 5):
            llm.engine._native = InterruptedNative(native, {step})  # type: ignore[assignment]
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["a", "b"], GREEDY)
            assert llm.engine.unfinished_request_ids() == set()
            assert native.num_unfinished_requests() == 0
            assert llm.engine.stats()["num_used_kv_blocks"] == 0
            assert [output.outputs for output in llm.generate(["a", "b"], GREEDY)] == expected


def test_an_interrupt_while_cleaning_up(tiny_llama: Path) -> None:
    with LLM(tiny_llama, **SETTINGS) as llm:
        expected = [output.outputs for output in llm.generate(["a", "b"], GREEDY)]
        llm.engine._native = InterruptedNative(llm.engine._native, {2, 3})  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], GREEDY)
        assert [output.outputs for output in llm.generate(["a", "b"], GREEDY)] == expected


SCRIPT = """
import sys, time
from steploop import LLM, SamplingParams

llm = LLM(sys.argv[1], max_num_seqs=8, num_kv_blocks=128, num_threads=1)
params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
expected = [output.outputs for output in llm.generate([[5, 6]] * 3, params)]
print("ready", flush=True)
for attempt in range(3):
    try:
        while True:
            llm.generate([[5, 6]] * 40, params)
    except KeyboardInterrupt:
        assert llm.engine.stats()["num_used_kv_blocks"] == 0
        print("interrupted", flush=True)
assert [output.outputs for output in llm.generate([[5, 6]] * 3, params)] == expected
print("same", flush=True)
"""


def test_real_ctrl_c(tiny_llama: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tiny_llama)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for delay in (0.3, 0.05, 0.11):
        time.sleep(delay)
        os.kill(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (0, "same\n"), stderr


def test_deferral() -> None:
    reached = []

    def interrupted() -> None:
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_deferral_respects_other_handlers() -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)


def test_deferral_in_another_thread() -> None:
    failures: list[BaseException] = []

    def use() -> None:
        try:
            with deferred_interrupts():
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert not failures
