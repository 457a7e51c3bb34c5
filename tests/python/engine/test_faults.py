"""What goes wrong with one request or one step, and that nothing else is lost."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from steploop import _C
from steploop.errors import (
    DuplicateRequestError,
    EngineDeadError,
    InvalidArgumentError,
    InvalidRequestError,
    ModelLoadError,
    RequestTooLongError,
    UnsupportedDeviceError,
)
from steploop.weights import load_model, open_checkpoint

from .serving import Work, make_engine, run

NAN_TOKEN = 299


@pytest.fixture(scope="module")
def tiny(tiny_llama: Path) -> Any:
    return load_model(open_checkpoint(str(tiny_llama), None), "float32")


def greedy(**settings: Any) -> Any:
    return _C.SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0, **settings})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_logits_fail_that_request_only(tiny_llama: Path, dtype: str) -> None:
    checkpoint = open_checkpoint(str(tiny_llama), None)
    model = _C.Model(checkpoint.spec.to_native(), dtype=dtype)
    for name, tensor in checkpoint.tensors(getattr(torch, dtype)):
        if name == "model.embed_tokens.weight":
            tensor = tensor.clone()
            tensor[NAN_TOKEN] = float("nan")
        model.load_weight(name, tensor)
    model.finish_loading()
    # Few blocks, so that those the failed request filled with NaN are used again at once.
    engine = make_engine(model, max_model_len=128, num_kv_blocks=16)
    work = {str(i): Work([i + 1, i + 2, i + 3] * (i + 4), greedy()) for i in range(5)}
    before = run(engine, work)
    bad = Work([1, 2, NAN_TOKEN, 4] * 9, greedy())
    mixed = run(engine, {"bad": bad, **work})
    assert mixed.pop("bad").finish_reason == "error"
    after = run(engine, work)
    for results in (mixed, after):
        assert {key: result.bits() for key, result in results.items()} == {key: r.bits() for key, r in before.items()}


def test_bad_requests_are_refused_and_those_behind_are_served(tiny: Any) -> None:
    engine = make_engine(tiny, max_model_len=64, num_kv_blocks=8)
    good = {"a": Work([1, 2, 3], greedy()), "b": Work([4, 5], greedy())}
    alone = run(engine, good)
    engine.add_request("a", good["a"].token_ids, good["a"].params)
    for token_ids, error, text in [
        ([], InvalidRequestError, "at least 1 token, got 0"),
        ([1, 300], InvalidRequestError, "must be in 0..299, got 300 at position 1"),
        ([-1], InvalidRequestError, "got -1"),
        ([1] * 64, RequestTooLongError, "exceeds max_model_len 64"),
        ([1] * 100000, RequestTooLongError, "100000 tokens"),
    ]:
        with pytest.raises(error, match=text):
            engine.add_request("bad", token_ids, greedy())
    with pytest.raises(DuplicateRequestError, match="request_id a is already in flight"):
        engine.add_request("a", [1], greedy())
    with pytest.raises(InvalidRequestError, match="stop_token_ids must be in 0..299, got 300"):
        engine.add_request("bad", [1], greedy(stop_token_ids=[300]))
    served = {"a": [], "b": []}
    engine.add_request("b", good["b"].token_ids, good["b"].params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            served[output.request_id] += output.token_ids
    assert served == {key: result.token_ids for key, result in alone.items()}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"block_size": 12}, "block_size must be 8, 16, 32 or 64, got 12"),
        ({"num_kv_blocks": 0}, "num_kv_blocks must be >= 1, got 0"),
        ({"num_kv_blocks": 3}, "needs 4: .* bytes short"),
        ({"max_model_len": 1}, "max_model_len must be >= 2, got 1"),
        ({"max_model_len": 1 << 20}, "max_model_len must be <= "),
        ({"max_num_seqs": 0}, "max_num_seqs must be in 1..65536, got 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be in 1..1048576, got 0"),
        ({"num_threads": -1}, "num_threads must be in 0..1024, got -1"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype must be float32, bfloat16 or int8 on the CPU, got"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype must be one of float32, bfloat16, float16, int8, got int3"),
        (
            {"scheduling_policy": "lifo"},
            "scheduling_policy must be one of on_demand, reserve, estimate, static, got lifo",
        ),
        ({"queue_order": "random"}, "queue_order must be one of fcfs, priority, .*, got random"),
        ({"preemption_mode": "kill"}, "preemption_mode must be one of recompute, swap, auto, got kill"),
        ({"prompt_sharing": "none"}, "prompt_sharing must be one of in_order, equal_progress, got none"),
        ({"preemption_mode": "swap"}, "num_host_blocks must be >= 1 with preemption_mode swap, got 0"),
        ({"num_host_blocks": 4}, "num_host_blocks must be 0 with preemption_mode recompute, got 4"),
        ({"num_host_blocks": -1}, "num_host_blocks must be >= 0, got -1"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\), got 1"),
        ({"watermark": 0.9}, "watermark 0.9.* keeps 3 of 4 KV blocks"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 63},
            "max_num_batched_tokens must be >= max_model_len 64, got 63",
        ),
        ({"max_num_queued_requests": -1}, "max_num_queued_requests must be >= 1, or 0 for no limit, got -1"),
        ({"max_num_queued_tokens": -1}, "max_num_queued_tokens must be >= 1, or 0 for no limit, got -1"),
        ({"iteration_stats_capacity": -1}, "iteration_stats_capacity must be in 0..1048576, got -1"),
        ({"iteration_stats_capacity": 2**31 - 1}, "iteration_stats_capacity must be in 0..1048576, got 2147483647"),
        ({"eos_token_ids": [300]}, "eos_token_ids must be in 0..299, got 300"),
    ],
)
def test_settings_that_cannot_be(tiny: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        make_engine(tiny, **{"max_model_len": 64, "num_kv_blocks": 4, **settings})


def test_a_device_that_is_not_there(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedDeviceError, match="no CUDA backend|no NVIDIA driver|the driver finds no GPU"):
            _C.Model(tiny.config, dtype="bfloat16", device="cuda")
    with pytest.raises(UnsupportedDeviceError, match="device must be cpu or cuda, got tpu"):
        _C.Model(tiny.config, dtype="float32", device="tpu")
    monkeypatch.setenv("STEPLOOP_CPU_ISA", "sse9")
    with pytest.raises(UnsupportedDeviceError, match="must be one that this processor has, .*portable; got sse9"):
        make_engine(tiny)


def test_abort_in_every_state(tiny: Any) -> None:
    engine = make_engine(tiny, max_model_len=64, num_kv_blocks=4, max_num_seqs=2)
    assert engine.abort_request("nobody") is False
    for request_id in ("running", "also", "waiting"):
        engine.add_request(request_id, [1, 2, 3], greedy(max_tokens=40))
    engine.step()
    assert engine.stats()["num_running"] == 2
    assert engine.abort_request("waiting")
    assert engine.abort_request("running")
    ended = {output.request_id: output.finish_reason for output in engine.step() if output.finished}
    assert ended == {"waiting": "abort", "running": "abort"}
    assert engine.abort_request("running") is False
    engine.add_request("running", [5], greedy())  # the id is free again
    assert engine.abort_request("running")  # before any step saw it
    assert [o.finish_reason for o in engine.step() if o.request_id == "running"] == ["abort"]
    while engine.has_unfinished_requests():
        engine.step()
    engine.check_integrity()
    assert engine.stats()["num_used_kv_blocks"] == 0
    assert engine.stats()["num_aborted"] == 3


def test_add_and_abort_from_other_threads_while_steps_run(tiny: Any) -> None:
    engine = make_engine(tiny, max_model_len=64, num_kv_blocks=24, max_num_seqs=8)
    num_threads, per_thread = 4, 60
    errors: list[BaseException] = []

    def client(index: int) -> None:
        try:
            for i in range(per_thread):
                request_id = f"{index}-{i}"
                engine.add_request(request_id, [index + 1, i + 1], greedy(max_tokens=1 + i % 20))
                if i % 3 == 0:
                    engine.abort_request(request_id)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    ended: dict[str, str] = {}
    deadline = time.monotonic() + 60
    while any(thread.is_alive() for thread in threads) or engine.has_unfinished_requests():
        assert time.monotonic() < deadline
        for output in engine.step():
            if output.finished:
                assert output.request_id not in ended
                ended[output.request_id] = output.finish_reason
    assert not errors
    assert len(ended) == num_threads * per_thread
    assert set(ended.values()) <= {"length", "abort"}
    engine.check_integrity()


def test_close_is_idempotent_and_final(tiny: Any) -> None:
    engine = make_engine(tiny)
    engine.add_request("a", [1], greedy())
    engine.close()
    engine.close()
    assert engine.closed
    assert not engine.has_unfinished_requests()
    for call in (engine.step, lambda: engine.add_request("b", [1], greedy()), lambda: engine.abort_request("a")):
        with pytest.raises(EngineDeadError, match="closed"):
            call()


def test_two_engines_in_one_process_share_nothing_but_the_model(tiny: Any) -> None:
    one, two = make_engine(tiny), make_engine(tiny, num_threads=1)
    work = {str(i): Work([i + 1] * (i + 1), greedy()) for i in range(8)}
    expected = run(one, work)
    results: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda name=name, engine=engine: results.update({name: run(engine, work)}))
        for name, engine in (("one", one), ("two", two))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in ("one", "two"):
        assert {key: r.bits() for key, r in results[name].items()} == {key: r.bits() for key, r in expected.items()}


def test_weights_that_do_not_load_are_not_taken_for_loaded(tiny_llama: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_llama), None)
    model = _C.Model(checkpoint.spec.to_native(), dtype="float32")
    tensors = dict(checkpoint.tensors(torch.float32))
    name, square = next((name, tensor) for name, tensor in tensors.items() if "down_proj" in name)
    for odd, text in [
        (square.t().contiguous().t(), "must be contiguous"),
        (square.to_sparse(), "ordinary strided"),
        (square.to(torch.int32), "float32, bfloat16 or float16, got torch.int32"),
        (square.to("meta"), "must be on the CPU"),
        ("not a tensor", "is not a torch.Tensor"),
    ]:
        with pytest.raises(ModelLoadError, match=text):
            model.load_weight(name, odd)
    with pytest.raises(ModelLoadError, match=f"missing {name}"):
        model.finish_loading()
    for each, tensor in tensors.items():
        model.load_weight(each, tensor)
    model.finish_loading()
    with pytest.raises(ModelLoadError, match="after finish_loading"):
        model.load_weight(name, square)


def test_native_arguments_of_the_wrong_kind(tiny: Any) -> None:
    with pytest.raises(TypeError):
        _C.Engine(None, max_model_len=64, num_kv_blocks=4, kv_cache_dtype="float32")
    for settings in ({"max_num_seq": 4}, {"max_num_seqs": "4"}, {"watermark": None}, {"scheduling_policy": 1}):
        with pytest.raises(TypeError, match=next(iter(settings))):
            make_engine(tiny, **settings)
    with pytest.raises(InvalidArgumentError, match="not loaded"):
        make_engine(_C.Model(tiny.config, dtype="float32"))
    engine = make_engine(tiny)
    with pytest.raises(TypeError):
        engine.add_request(b"a", [1], greedy())
    for arrival_time in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidRequestError, match="arrival_time must be seconds >= 0"):
            engine.add_request("a", [1], greedy(), arrival_time)
    assert not engine.has_unfinished_requests()


def test_an_engine_says_that_it_did_not_survive_fork(tiny: Any) -> None:
    engine = make_engine(tiny)
    engine.add_request("a", [1, 2], greedy())
    child = os.fork()
    if child == 0:
        try:
            engine.step()
            os._exit(1)
        except EngineDeadError as error:
            os._exit(0 if "fork" in str(error) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    while engine.has_unfinished_requests():
        engine.step()


def test_looking_at_an_engine_while_another_thread_steps_and_closes_it(tiny: Any) -> None:
    engine = make_engine(tiny)
    engine.add_request("a", [1, 2, 3], greedy(max_tokens=400))
    ended: list[BaseException] = []

    def serve() -> None:
        try:
            while True:
                engine.step()
        except EngineDeadError as error:
            ended.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    for seed in range(50):
        engine.shuffle_free_blocks(seed)
        engine.check_integrity()
        assert engine.last_logits().shape[0] <= 1
    engine.close()
    assert engine.last_logits().shape[0] == 0
    thread.join(timeout=30)
    assert ended


def test_teacher_forced_logits_needs_an_idle_engine(tiny: Any) -> None:
    engine = make_engine(tiny, max_model_len=64, num_kv_blocks=8)
    for token_ids, text in [([], "1..64 tokens, got 0"), ([1] * 65, "got 65"), ([300], "must be in 0..299")]:
        with pytest.raises(InvalidRequestError, match=text):
            engine.teacher_forced_logits(token_ids)
    engine.add_request("a", [1, 2, 3], greedy())
    with pytest.raises(InvalidRequestError, match="no request in flight"):
        engine.teacher_forced_logits([1])
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.teacher_forced_logits([1, 2, 3]).shape == (3, 300)
    engine.check_integrity()
