"""Devices to simulate: their rates as the makers give them, and what of these is reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steploop.checks import as_finite, check_positive
from steploop.errors import InvalidArgumentError
from steploop.workload.specs import unknown_name

GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """What is reached of a device's rates, and what every step costs besides. The defaults are assumptions about
    well-made kernels on a large GPU, none of them fitted to a published result; `steploop calibrate` measures those of
    this machine.

    Raises:
        InvalidArgumentError: a number out of range.
    """

    weight_bandwidth_efficiency: float = 0.8
    """Of the memory's rate, while weights are read. Decode GEMMs of 16-bit weights reach 75 to 90% of it."""
    compute_efficiency: float = 0.65
    """Of the peak rate, in linear layers with many tokens."""
    kv_bandwidth_efficiency: float = 0.7
    """Of the memory's rate, while a decode's keys and values are read."""
    attention_compute_efficiency: float = 0.4
    """Of the peak rate, in the attention of prompts."""
    overlap: float = 1.0
    """How far reading weights and computing with them overlap: 1: the longer of the two counts; 0: their sum."""
    step_us: float = 500.0
    """Of every step: scheduling, launching, sampling."""
    sequence_us: float = 5.0
    """For each sequence in it."""
    sample_row_us: float = 2.0
    """For each row of logits that is sampled."""
    token_us: float = 0.0
    """For each token: what is in no linear layer and no attention."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = as_finite(getattr(self, field.name))
            positive = field.name.endswith("_efficiency")
            if value is None or value < 0 or (positive and value == 0) or (field.name == "overlap" and value > 1):
                span = "in [0, 1]" if field.name == "overlap" else f"a finite number {'>' if positive else '>='} 0"
                raise InvalidArgumentError(f"{field.name} must be {span}, got {getattr(self, field.name)!r}")

    def replace(self, changes: Mapping[str, float]) -> Efficiencies:
        """The same with other values for some.

        Raises:
            InvalidArgumentError: a name that is none, with the nearest; a number out of range.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise unknown_name("an efficiency", name, known)
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device.

    Raises:
        InvalidArgumentError: a rate or size that is not > 0.
    """

    name: str
    memory_bytes: int
    bytes_per_second: float
    """Of its memory."""
    flops_per_second: float
    """Dense, with 16-bit inputs."""
    link_bytes_per_second: float
    """To the devices beside it, one way."""
    all_reduce_us: float
    """How long an exchange of nothing takes."""
    host_bytes_per_second: float
    """To the host's memory, one way."""
    efficiencies: Efficiencies = Efficiencies()
    fast_dtypes: tuple[str, ...] = ("int8", "fp8")
    """Of weights, with inputs of the same type: multiplied at twice flops_per_second."""
    is_calibrated: bool = False
    """Its rates were measured with a model, for the types that this was in."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name == "memory_bytes" or field.name.endswith("_per_second"):
                check_positive(f"{field.name} of {self.name}", getattr(self, field.name))
        if (delay := as_finite(self.all_reduce_us)) is None or delay < 0:
            raise InvalidArgumentError(
                f"all_reduce_us of {self.name} must be a finite number >= 0, got {self.all_reduce_us!r}"
            )

    def as_dict(self) -> dict[str, Any]:
        """All of it, for a report."""
        return dataclasses.asdict(self)


# Data sheets: NVIDIA A100 (DS-10031), H100 SXM, H200 SXM and L4. Rates without sparsity; one way of NVLink is half of
# what a data sheet says. The host link is PCIe with 16 lanes, at about 80% of its rate.
DEVICES = {
    device.name: device
    for device in (
        Device(
            name="A100-40GB",
            memory_bytes=40 * 2**30,
            bytes_per_second=1555 * GB,
            flops_per_second=312e12,
            link_bytes_per_second=300 * GB,
            all_reduce_us=10,
            host_bytes_per_second=25 * GB,
            fast_dtypes=("int8",),
        ),
        Device(
            name="A100-80GB",
            memory_bytes=80 * 2**30,
            bytes_per_second=2039 * GB,
            flops_per_second=312e12,
            link_bytes_per_second=300 * GB,
            all_reduce_us=10,
            host_bytes_per_second=25 * GB,
            fast_dtypes=("int8",),
        ),
        Device(
            name="H100",
            memory_bytes=80 * 2**30,
            bytes_per_second=3350 * GB,
            flops_per_second=989e12,
            link_bytes_per_second=450 * GB,
            all_reduce_us=10,
            host_bytes_per_second=50 * GB,
        ),
        Device(
            name="H200",
            memory_bytes=141 * GB,
            bytes_per_second=4800 * GB,
            flops_per_second=989e12,
            link_bytes_per_second=450 * GB,
            all_reduce_us=10,
            host_bytes_per_second=50 * GB,
        ),
        Device(
            name="L4",
            memory_bytes=24 * 2**30,
            bytes_per_second=300 * GB,
            flops_per_second=121e12,
            link_bytes_per_second=25 * GB,
            all_reduce_us=30,
            host_bytes_per_second=25 * GB,
        ),
    )
}


def find_device(name: str) -> Device:
    """The preset of that name, in any case of letters.

    Raises:
        InvalidArgumentError: there is none; with those that exist and the nearest.
    """
    for known, device in DEVICES.items():
        if known.lower() == name.lower():
            return device
    raise unknown_name("--device", name, [*DEVICES, "this-machine", "FILE.json"])
