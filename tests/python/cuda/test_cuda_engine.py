"""The whole engine on an emulated CUDA device: the shipped kernels and exec, compiled for the host."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from steploop import _C, LLMEngine, SamplingParams
from steploop.errors import (
    EngineDeadError,
    InvalidArgumentError,
    ModelLoadError,
    SteploopError,
    UnsupportedDeviceError,
    UnsupportedModelError,
)
from steploop.weights import open_checkpoint

from ..engine.serving import Result, Work, make_engine, random_work, run
from .conftest import SHAPES, load

pytestmark = pytest.mark.usefixtures("emulated_device")


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_the_cpus(checkpoints: Callable[[str], Path], name: str) -> None:
    token_ids = [random.Random(1).randrange(300) for _ in range(70)]
    logits = {}
    for device in ("cpu", "cuda"):
        engine = make_engine(load(checkpoints(name), device), max_num_batched_tokens=48, num_kv_blocks=64)
        logits[device] = engine.teacher_forced_logits(token_ids)
    difference = np.linalg.norm(logits["cuda"] - logits["cpu"]) / np.linalg.norm(logits["cpu"])
    assert difference < 2e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_are_those_of_float32(checkpoints: Callable[[str], Path], name: str, dtype: str) -> None:
    token_ids = [random.Random(2).randrange(300) for _ in range(40)]
    exact = make_engine(load(checkpoints(name), "cpu", "float32"), num_kv_blocks=64).teacher_forced_logits(token_ids)
    engine = make_engine(load(checkpoints(name), "cuda", dtype), num_kv_blocks=64)
    difference = np.linalg.norm(engine.teacher_forced_logits(token_ids) - exact) / np.linalg.norm(exact)
    assert difference < (3e-2 if dtype == "bfloat16" else 4e-3)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_tokens_are_the_cpus_unless_logits_are_tied(checkpoints: Callable[[str], Path], name: str) -> None:
    rng = random.Random(3)
    greedy = _C.SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    work = {str(i): Work([rng.randrange(300) for _ in range(rng.randint(1, 60))], greedy) for i in range(8)}
    cpu = make_engine(load(checkpoints(name), "cpu"))
    expected = run(cpu, work)
    settings: dict[str, Any] = {"max_num_batched_tokens": 40, "num_kv_blocks": 20, "block_size": 8, "max_model_len": 96}
    results = run(make_engine(load(checkpoints(name), "cuda"), **settings), work, shuffle_seed=1)
    same = 0
    for key, one in work.items():
        ours, theirs = results[key].token_ids, expected[key].token_ids
        assert len(ours) == len(theirs) == 16
        at = next((i for i in range(16) if ours[i] != theirs[i]), None)
        same += 16 if at is None else at
        if at is not None:
            logits = cpu.teacher_forced_logits(one.token_ids + theirs[:at])[-1]
            assert abs(logits[ours[at]] - logits[theirs[at]]) < 0.03 * np.abs(logits).max()
    assert same > 8 * 8  # else the comparison says little


def bits_under(model: Any, work: dict[str, Work], **settings: Any) -> dict[str, Result]:
    return run(make_engine(model, **settings), work, shuffle_seed=5)


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bfloat16"), ("qwen3", "float16")])
def test_results_do_not_depend_on_the_batch(
    checkpoints: Callable[[str], Path], name: str, dtype: str, report: Callable[[str], None]
) -> None:
    model = load(checkpoints(name), "cuda", dtype)
    work = random_work(300, 12, longest=40, outputs=30, seed=4)
    rng = random.Random(5)
    # Past 512 tokens attention has several splits, which an item of the planner may cut apart.
    greedy = _C.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)
    for length in (510, 530):
        work[f"long-{length}"] = Work([rng.randrange(300) for _ in range(length)], greedy, step=1)
    expected = bits_under(model, work, max_model_len=600)
    for key in ("0", "1", "long-530"):
        alone = bits_under(model, {key: Work(work[key].token_ids, work[key].params)}, max_model_len=600)
        assert alone[key].bits() == expected[key].bits(), f"request {key} alone"
    preemptions = 0
    for longest, settings in (
        (96, {"block_size": 8, "max_num_batched_tokens": 33, "num_kv_blocks": 12}),
        (600, {"block_size": 64, "max_num_batched_tokens": 200, "max_num_seqs": 5, "num_kv_blocks": 12}),
    ):
        fitting = {key: one for key, one in work.items() if len(one.token_ids) < longest}
        results = bits_under(model, fitting, max_model_len=longest, **settings)
        preemptions += sum(result.num_preemptions for result in results.values())
        for key in fitting:
            assert results[key].bits() == expected[key].bits(), f"request {key} under {settings}"
    report(f"batch invariance on emulated CUDA, {name} {dtype}: {preemptions} preemptions met")
    assert preemptions > 0


def test_sampling_on_the_device_draws_what_the_host_draws(checkpoints: Callable[[str], Path]) -> None:
    """With log-probabilities of other tokens the host samples a row: the same draws from the same logits."""
    model = load(checkpoints("llama"), "cuda")
    results = []
    for logprobs in (0, 3):
        work = {
            str(seed): Work(
                [1, 2, 3 + seed],
                _C.SamplingParams(
                    temperature=0.9, top_p=0.95, top_k=40 if seed % 2 else 0, seed=seed, max_tokens=8,
                    min_tokens=4, stop_token_ids=list(range(0, 300, 7)), logprobs=logprobs,
                ),
            )
            for seed in range(8)
        }  # fmt: skip
        results.append(run(make_engine(model, num_kv_blocks=64), work))
    for key in results[0]:
        assert results[0][key].token_ids == results[1][key].token_ids
        assert results[0][key].finish_reason == results[1][key].finish_reason
        np.testing.assert_allclose(results[0][key].logprobs, results[1][key].logprobs, rtol=1e-5, atol=1e-5)
        assert all(token % 7 for token in results[0][key].token_ids[:3])


def test_parameters_that_the_host_applies(checkpoints: Callable[[str], Path]) -> None:
    """Penalties, biases and min_p, and the likelihood of a prompt: the same bits in chunks beside others as alone."""
    params = {
        "a": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, seed=1, max_tokens=8, prompt_logprobs=2),
        "b": SamplingParams(min_p=0.1, logit_bias={7: 2.0}, seed=2, max_tokens=8),
        "c": SamplingParams(temperature=0, presence_penalty=1.0, max_tokens=8, prompt_logprobs=0, logprobs=1),
        "d": SamplingParams(seed=4, max_tokens=8),
    }
    prompts = {name: [3 + (index * 7 + ord(name)) % 250 for index in range(25)] for name in params}

    def serve(names: str, **settings: Any) -> dict[str, Any]:
        outputs = {}
        with LLMEngine(model=checkpoints("llama"), device="cuda", max_num_seqs=4, **settings) as engine:
            for name in names:
                engine.add_request(name, prompts[name], params[name])
            while engine.has_unfinished_requests():
                outputs |= {output.request_id: output for output in engine.step()}
        return outputs

    together = serve("abcd", max_num_batched_tokens=9)
    for name in params:
        assert together[name] == serve(name)[name]
    scores = together["a"].prompt_logprobs
    with LLMEngine(model=checkpoints("llama"), device="cpu", dtype="bfloat16", max_num_seqs=4) as engine:
        engine.add_request("a", prompts["a"], params["a"])
        [output] = engine.step()
    for token, ours, cpus in zip(prompts["a"][1:], scores[1:], output.prompt_logprobs[1:], strict=True):
        assert ours[token].logprob == pytest.approx(cpus[token].logprob, abs=0.1)


def test_without_batch_invariance_torch_multiplies(
    checkpoints: Callable[[str], Path], emulated_device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.ops.load_library(str(emulated_device.with_name("libsteploop_emulated_ops.so")))
    # The operator of the emulated device multiplies on the CPU; all else is as on a GPU.
    monkeypatch.setattr("steploop.engine.torch_matmul", torch.ops.steploop_emulated.matmul_address)
    folder = checkpoints("llama-biases")
    with LLMEngine(model=folder, device="cuda", max_num_seqs=4, batch_invariant=False) as engine:
        engine.add_request("a", list(range(2, 30)), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert len(outputs[0].outputs[0].token_ids) == 6
        assert engine.stats()["batch_invariant"] is False
        assert engine.dtype == "bfloat16"
    token_ids = [random.Random(6).randrange(300) for _ in range(40)]
    ours, torchs = (
        make_engine(load(folder, "cuda"), num_kv_blocks=64, matmul=matmul).teacher_forced_logits(token_ids)
        for matmul in (0, torch.ops.steploop_emulated.matmul_address())
    )
    assert 0 < np.linalg.norm(ours - torchs) / np.linalg.norm(ours) < 3e-2


def test_a_failing_kernel_ends_the_engine_and_nothing_hangs(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LLMEngine(model=checkpoints("llama"), device="cuda", max_num_seqs=4)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    monkeypatch.setenv("STEPLOOP_EMULATED_FAULT", "launch:700:5")  # an illegal address, some kernels into the step
    with pytest.raises(EngineDeadError, match=r"CUDA: .* failed: .*illegal.*cudaErrorIllegalAddress"):
        engine.step()
    monkeypatch.delenv("STEPLOOP_EMULATED_FAULT")
    assert not engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError, match="failed in an earlier step"):
        engine.add_request("b", [1], None)
    engine.close()
    with LLMEngine(model=checkpoints("llama"), device="cuda", max_num_seqs=4) as other:  # the process goes on
        other.add_request("a", [1, 2, 3], SamplingParams(max_tokens=2))
        other.step()


@pytest.mark.parametrize(
    "call",
    [
        "cudaMemcpyAsync",
        "cudaStreamSynchronize",
        "cudaStreamCreateWithFlags",
        "cudaMemsetAsync",
        "cudaMallocHost",
        "cudaEventCreateWithFlags",
        "cudaMemcpy",
        "cudaDeviceSynchronize",
    ],
)
def test_every_failing_call_is_reported(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setenv("STEPLOOP_EMULATED_FAULT", f"{call}:999")
    with pytest.raises(SteploopError, match="CUDA: .* failed: .*cudaErrorUnknown"):
        with LLMEngine(model=checkpoints("llama"), device="cuda", max_num_seqs=4) as engine:
            engine.add_request("a", [1, 2, 3], None)
            engine.step()


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("driver=0", "no NVIDIA driver is installed here; install one that supports CUDA 13.0"),
        ("driver=12040", "the NVIDIA driver supports CUDA 12.4, but this build needs 13.0; update the driver"),
        ("count=0", "the driver finds no GPU"),
        ("major=7,minor=5", "compute capability 7.5, but this build has code for 8.0 and later"),
    ],
)
def test_a_device_that_cannot_run_this(
    checkpoints: Callable[[str], Path], fresh_process: Callable[[str, dict[str, str]], str], device: str, words: str
) -> None:
    code = f"import steploop; steploop.LLMEngine(model={str(checkpoints('llama'))!r}, device='cuda')"
    error = fresh_process(code, {"STEPLOOP_EMULATED_DEVICE": device})
    assert f"UnsupportedDeviceError: device cuda: {words}" in error or words in error
    assert "UnsupportedDeviceError" in error
    assert 'or use device="cpu"' in error


def test_a_build_without_code_for_the_device(
    checkpoints: Callable[[str], Path], fresh_process: Callable[[str, dict[str, str]], str]
) -> None:
    code = f"import steploop; steploop.LLMEngine(model={str(checkpoints('llama'))!r}, device='cuda')"
    error = fresh_process(code, {"STEPLOOP_EMULATED_FAULT": "cudaFuncGetAttributes:209"})
    assert "UnsupportedDeviceError: device cuda: emulated device, compute capability 9.0, but this build has" in error
    assert "build steploop with STEPLOOP_CUDA_ARCHITECTURES=90" in error


def test_small_shared_memory(
    checkpoints: Callable[[str], Path], fresh_process: Callable[[str, dict[str, str]], str]
) -> None:
    code = f"import steploop; steploop.LLMEngine(model={str(checkpoints('llama-256'))!r}, device='cuda')"
    error = fresh_process(code, {"STEPLOOP_EMULATED_DEVICE": "major=8,minor=6"})
    assert "attention with head_dim 256 needs" in error
    assert "bytes of shared memory in a block, but emulated device" in error


def test_out_of_memory_at_the_start(
    checkpoints: Callable[[str], Path], fresh_process: Callable[[str, dict[str, str]], str]
) -> None:
    folder = str(checkpoints("llama"))
    code = f"import steploop; steploop.LLMEngine(model={folder!r}, device='cuda', max_model_len=512{{}})"
    error = fresh_process(code.format(", gpu_memory_utilization=0.5"), {"STEPLOOP_EMULATED_DEVICE": "memory=40000000"})
    assert "InvalidArgumentError: the KV cache must hold one sequence of max_model_len=512 tokens" in error
    assert "gpu_memory_utilization=0.5 of the device's 38.15 MiB" in error
    assert "raise gpu_memory_utilization, or set kv_cache_memory_bytes to at least" in error
    error = fresh_process(code.format(", num_kv_blocks=100000"), {"STEPLOOP_EMULATED_DEVICE": "memory=40000000"})
    assert "InvalidArgumentError: num_kv_blocks=100000 asks for a KV cache of" in error
    error = fresh_process(code.format(""), {"STEPLOOP_EMULATED_DEVICE": "memory=10000000"})
    assert "InvalidArgumentError: the device has" in error
    assert "but weights take" in error
    assert "lower max_num_batched_tokens or max_num_seqs" in error


@pytest.mark.parametrize(
    ("memory", "num_kv_blocks", "words"),
    [
        (
            40_000_000,
            100_000,
            "needed for the KV cache; lower gpu_memory_utilization, kv_cache_memory_bytes or",
        ),
        (10_000_000, 32, "needed for activations; lower max_num_batched_tokens or max_num_seqs"),
        (100_000, 32, "needed for weights; take a smaller model"),
    ],
)
def test_native_memory_errors(
    checkpoints: Callable[[str], Path],
    fresh_process: Callable[[str, dict[str, str]], str],
    memory: int,
    num_kv_blocks: int,
    words: str,
) -> None:
    code = (
        "from steploop import _C; from steploop.weights import load_model, open_checkpoint\n"
        f"model = load_model(open_checkpoint({str(checkpoints('llama'))!r}, None), 'bfloat16', 'cuda')\n"
        f"_C.Engine(model, max_model_len=512, num_kv_blocks={num_kv_blocks}, kv_cache_dtype='bfloat16')"
    )
    error = fresh_process(code, {"STEPLOOP_EMULATED_DEVICE": f"memory={memory}"})
    assert re.search(f"InvalidArgumentError: the GPU has .* bytes free, but .* more are {words}", error), error


def test_weights_on_the_device(checkpoints: Callable[[str], Path]) -> None:
    """Tensors that say they are on the device load like those of the host, whatever their dtype."""

    class OnDevice:
        def __init__(self, tensor: torch.Tensor, index: int = 0) -> None:
            self.tensor = tensor
            self.device = torch.device("cuda", index)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tensor, name)

    checkpoint = open_checkpoint(str(checkpoints("llama-biases")), None)
    model = _C.Model(checkpoint.spec.to_native(), dtype="bfloat16", device="cuda")
    for index, (name, tensor) in enumerate(checkpoint.tensors(torch.float32)):
        model.load_weight(name, OnDevice(tensor.contiguous() if index % 2 else tensor.bfloat16().contiguous()))
    model.finish_loading()
    token_ids = [random.Random(8).randrange(300) for _ in range(20)]
    logits = make_engine(model, num_kv_blocks=64).teacher_forced_logits(token_ids)
    expected = make_engine(load(checkpoints("llama-biases"), "cuda"), num_kv_blocks=64).teacher_forced_logits(token_ids)
    # Biases and norms that came in bfloat16 are rounded; the others are not.
    assert np.linalg.norm(logits - expected) < 2e-2 * np.linalg.norm(expected)
    with pytest.raises(ModelLoadError, match="must be on the CPU or on the model's device, got cuda:1"):
        _C.Model(checkpoint.spec.to_native(), dtype="bfloat16", device="cuda").load_weight(name, OnDevice(tensor, 1))


def test_libraries_that_are_no_backend(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = tmp_path / "text.so"
    text.write_text("not a library")
    for library, words in {
        str(tmp_path / "absent.so"): "no such file",
        "x" * 5000: "no such file",
        str(text): "cannot load the CUDA backend",
        str(tmp_path): "cannot load the CUDA backend",
        _C.__file__: "is not steploop's CUDA backend",
    }.items():
        monkeypatch.setenv("STEPLOOP_CUDA_LIBRARY", library)
        with pytest.raises(UnsupportedDeviceError, match=words):
            LLMEngine(model=checkpoints("llama"), device="cuda")


def test_a_failure_in_teacher_forced_logits_ends_the_engine(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(load(checkpoints("llama"), "cuda"), num_kv_blocks=64)
    monkeypatch.setenv("STEPLOOP_EMULATED_FAULT", "launch:700:3")
    with pytest.raises(EngineDeadError, match="cudaErrorIllegalAddress"):
        engine.teacher_forced_logits([1, 2, 3])
    monkeypatch.delenv("STEPLOOP_EMULATED_FAULT")
    with pytest.raises(EngineDeadError, match="failed in an earlier step"):
        engine.step()


def test_sizes_are_checked_before_memory_is_reckoned(checkpoints: Callable[[str], Path]) -> None:
    spec = open_checkpoint(str(checkpoints("llama")), None).spec.to_native()
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 16}
    for name in sizes:
        with pytest.raises(InvalidArgumentError, match=name):
            _C.Engine.activation_bytes(
                spec, dtype="bfloat16", kv_cache_dtype="bfloat16", device="cuda", batch_invariant=True,
                **sizes | {name: 0},
            )  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch has CUDA")
def test_cublas_needs_a_torch_with_cuda(checkpoints: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedDeviceError, match="batch_invariant=False needs a torch that runs on CUDA"):
        LLMEngine(model=checkpoints("llama"), device="cuda", batch_invariant=False)


def test_types_and_shapes_that_the_device_lacks(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoints("llama")
    with pytest.raises(UnsupportedDeviceError, match="device cuda computes in bfloat16 or float16, got dtype float32"):
        LLMEngine(model=folder, device="cuda", dtype="float32")
    with pytest.raises(InvalidArgumentError, match="kv_cache_dtype must be the compute type on CUDA, bfloat16, got"):
        LLMEngine(model=folder, device="cuda", kv_cache_dtype="float32")
    with pytest.raises(UnsupportedDeviceError, match="kv_cache_dtype int8 is for device cpu"):
        LLMEngine(model=folder, device="cuda", kv_cache_dtype="int8")
    with pytest.raises(UnsupportedDeviceError, match="device cpu computes in float32 or bfloat16, got dtype float16"):
        LLMEngine(model=folder, dtype="float16")
    with pytest.raises(UnsupportedDeviceError, match="device must be cpu or cuda, got tpu"):
        LLMEngine(model=folder, device="tpu")
    import transformers

    for shape, words in {
        "head_dim": (80, "head_dim must be 64, 96, 128 or 256, got 80"),
        "vocab_size": (2**19 + 8, "vocab_size must be <= 524288, got 524296"),
        "hidden_size": (16448, "hidden_size must be <= 16384, got 16448"),
    }.items():
        small = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 64}
        config = transformers.LlamaConfig(**small | {"num_attention_heads": 2, shape: words[0]})
        config.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(
            json.dumps(json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]})
        )
        safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")  # is not reached
        with pytest.raises(UnsupportedModelError, match=words[1]):
            LLMEngine(model=tmp_path, device="cuda")
