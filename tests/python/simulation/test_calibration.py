"""Calibration: factors that are put into steps come out of them; a run of the engine; its file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steploop import _C, EngineConfig, LLMEngine, SamplingParams
from steploop.errors import InvalidArgumentError
from steploop.simulation import Calibration, Deployment, Device, Efficiencies, calibrate, find_device, find_model
from steploop.simulation.calibration import grid_size, measured_device
from steploop.simulation.fit import WORK, MeasuredSteps, fit_factors


def steps_of(deployment: Deployment, *, noise: float = 0.0) -> MeasuredSteps:
    """Steps like those of the grid, as long as the cost model says."""
    rows = [(count, count, count, count * keys, 0) for count in (1, 2, 4, 8, 16, 32, 64) for keys in (16, 200, 1000)]
    rows += [(count, 1, 1, 0, count * (count + 1) // 2) for count in (8, 16, 32, 64, 128, 256, 512, 1024)]
    rows += [(2048, 3, 0, 0, 2048 * 512), (128 + 16, 17, 16, 16 * 40, 128 * 64)]
    work = {name: np.array(column, np.float64) for name, column in zip(WORK, zip(*rows, strict=True), strict=True)}
    cost = _C.CostModel(deployment.cost_fields(16))
    total = np.array([cost.duration_us(**dict(zip(WORK, row, strict=True))) for row in rows])
    reached = deployment.device.efficiencies
    host = reached.step_us + reached.sequence_us * work["num_sequences"]
    random = np.random.default_rng(1)
    wrong = 1 + noise * random.standard_normal(len(rows))
    return MeasuredSteps(work, (total - host) * wrong, host * wrong)


@pytest.fixture
def deployment() -> Deployment:
    device = Device(
        name="known",
        memory_bytes=2**35,
        bytes_per_second=22e9,
        flops_per_second=400e9,
        link_bytes_per_second=1.0,
        all_reduce_us=0.0,
        host_bytes_per_second=5e9,
        is_calibrated=True,
        efficiencies=Efficiencies(
            weight_bandwidth_efficiency=1.0,
            compute_efficiency=1.0,
            kv_bandwidth_efficiency=0.6,
            attention_compute_efficiency=0.3,
            overlap=0.4,
            step_us=250.0,
            sequence_us=20.0,
            sample_row_us=30.0,
        ),
    )
    return Deployment(model=find_model("llama-3-8b"), device=device)


def test_what_was_put_in_comes_out(deployment: Deployment) -> None:
    factors = fit_factors(steps_of(deployment), deployment.cost_fields(16))
    assert factors.flops_per_second == pytest.approx(400e9, rel=0.01)
    assert factors.bytes_per_second == pytest.approx(22e9, rel=0.02)
    assert factors.overlap == pytest.approx(0.4, abs=0.02)
    assert factors.kv_bytes_per_second == pytest.approx(0.6 * 22e9, rel=0.02)
    assert factors.attention_flops_per_second == pytest.approx(0.3 * 400e9, rel=0.05)
    assert factors.step_us == pytest.approx(250, rel=1e-6)
    assert factors.sequence_us == pytest.approx(20, rel=1e-6)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_fitted_model_is_near_the_steps(deployment: Deployment, noise: float) -> None:
    exact = steps_of(deployment)
    factors = fit_factors(steps_of(deployment, noise=noise), deployment.cost_fields(16))
    device = measured_device(deployment.device, factors)
    cost = _C.CostModel(dataclasses.replace(deployment, device=device).cost_fields(16))
    rows = zip(*(exact.work[name].astype(int).tolist() for name in WORK), strict=True)
    fitted = np.array([cost.duration_us(**dict(zip(WORK, row, strict=True))) for row in rows])
    errors = np.abs(fitted / exact.total_us - 1)
    assert np.median(errors) < 0.002 + noise
    assert errors.max() < 0.01 + 2 * noise


# ---- A run of the engine ----


@pytest.fixture(scope="module")
def calibration(tiny_llama: Path) -> Calibration:
    config = EngineConfig(
        model=tiny_llama, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=128, num_kv_blocks=200
    )
    with LLMEngine(config) as engine:
        calls: list[None] = []
        calibration = calibrate(engine, find_model(str(tiny_llama)), num_repeats=2, report=lambda: calls.append(None))
        assert len(calls) == 2 * grid_size(engine)
        assert not engine.has_unfinished_requests()
        assert engine.stats()["num_used_kv_blocks"] == 0
    return calibration


def test_the_engine_is_measured(calibration: Calibration) -> None:
    assert calibration.weight_dtype == calibration.kv_cache_dtype == "float32"
    assert calibration.model.num_layers == 2
    assert calibration.about["num_threads"] >= 1
    steps = {name: np.array(values) for name, values in calibration.steps.items()}
    assert steps["num_tokens"].max() == 128
    assert steps["num_sequences"].max() == 16
    assert steps["num_decode_keys"].max() > 0
    assert steps["num_prompt_pairs"].max() > 0
    assert (steps["device_us"] > 0).all()
    assert (steps["host_us"] >= 0).all()
    assert 0 <= calibration.fit["median"] <= calibration.fit["p90"] <= calibration.fit["max"]
    _C.CostModel(deployment_of(calibration).cost_fields(16))


def deployment_of(calibration: Calibration) -> Deployment:
    return Deployment(
        model=calibration.model,
        device=calibration.device,
        weight_dtype=calibration.weight_dtype,
        kv_cache_dtype=calibration.kv_cache_dtype,
    )


def test_a_file_is_what_was_measured(calibration: Calibration, tmp_path: Path) -> None:
    calibration.save(tmp_path / "here.json")
    assert Calibration.load(tmp_path / "here.json") == calibration


def test_an_engine_at_work_is_not_measured(tiny_llama: Path) -> None:
    with LLMEngine(model=tiny_llama, max_model_len=64) as engine:
        engine.add_request("a", {"prompt_token_ids": [5]}, SamplingParams(max_tokens=4))
        with pytest.raises(InvalidArgumentError, match="nothing in flight"):
            calibrate(engine, find_model(str(tiny_llama)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: "[]", "is no steploop calibration 1"),
        (lambda content: "{", "cannot be read"),
        (
            lambda content: json.dumps(content | {"format": "steploop calibration 0"}),
            "make one with: steploop calibrate",
        ),
        (lambda content: json.dumps({k: v for k, v in content.items() if k != "device"}), "is damaged"),
        (lambda content: json.dumps(content | {"device": 5}), "is damaged"),
        (lambda content: json.dumps(content | {"speed": 5}), "is damaged"),
        (lambda content: json.dumps(content | {"weight_dtype": "int3"}), "dtype must be one of"),
        (lambda content: change_device(content, memory_bytes=-1), "memory_bytes of this-machine must be"),
        (lambda content: change_device(content, bytes_per_second="fast"), "bytes_per_second of this-machine must be"),
        (lambda content: change_device(content, link_bytes_per_second=0), "link_bytes_per_second of this-machine"),
        (lambda content: change_device(content, efficiencies={"step_us": -1}), "step_us must be"),
        (lambda content: json.dumps(content | {"model": content["model"] | {"num_layers": -2}}), "num_layers"),
        (lambda content: json.dumps(content | {"model": content["model"] | {"num_heads": "two"}}), "num_heads"),
    ],
)
def test_bad_files(calibration: Calibration, tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "bad.json"
    calibration.save(path)
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(InvalidArgumentError, match=message):
        Calibration.load(path)


def change_device(content: dict[str, Any], **fields: Any) -> str:
    return json.dumps(content | {"device": content["device"] | fields})


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        Calibration.load(tmp_path / "none.json")


def test_a_preset_is_no_file() -> None:
    assert find_device("h100").fast_dtypes == ("int8", "fp8")
