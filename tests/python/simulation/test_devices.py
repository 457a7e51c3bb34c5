"""Devices and Efficiencies: presets, names, ranges."""

from __future__ import annotations

import dataclasses

import pytest

from steploop.errors import InvalidArgumentError
from steploop.simulation.devices import DEVICES, Efficiencies, find_device


def test_presets() -> None:
    assert list(DEVICES) == ["A100-40GB", "A100-80GB", "H100", "H200", "L4"]
    h100 = find_device("h100")
    assert h100 is DEVICES["H100"]
    assert (h100.memory_bytes, h100.bytes_per_second, h100.flops_per_second) == (80 * 2**30, 3.35e12, 989e12)


def test_unknown() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        find_device("H10")
    assert str(caught.value) == (
        "--device must be one of A100-40GB, A100-80GB, H100, H200, L4, this-machine, FILE.json, got 'H10'; did you "
        "mean H100?"
    )


def test_replace() -> None:
    changed = Efficiencies().replace({"step_us": 0, "compute_efficiency": 0.5})
    assert changed == Efficiencies(step_us=0, compute_efficiency=0.5)
    with pytest.raises(InvalidArgumentError, match=r"an efficiency must be one of .*; did you mean step_us\?"):
        Efficiencies().replace({"steps_us": 1})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("compute_efficiency", 0, "compute_efficiency must be a finite number > 0, got 0"),
        ("kv_bandwidth_efficiency", -1, "must be a finite number > 0, got -1"),
        ("step_us", -1, "step_us must be a finite number >= 0, got -1"),
        ("sequence_us", float("inf"), "must be a finite number >= 0, got inf"),
        ("token_us", float("nan"), "must be a finite number >= 0, got nan"),
        ("overlap", 1.1, r"overlap must be in [0, 1], got 1.1"),
    ],
)
def test_efficiencies_out_of_range(name: str, value: float, words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Efficiencies(**{name: value})
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["memory_bytes", "bytes_per_second", "flops_per_second", "host_bytes_per_second"])
def test_rates_must_be_positive(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} of L4 must be a finite number > 0, got 0"):
        dataclasses.replace(DEVICES["L4"], **{name: 0})
