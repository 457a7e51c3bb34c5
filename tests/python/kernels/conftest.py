"""Every kernel test runs once per instruction set."""

import os
from collections.abc import Iterator

import pytest
import torch

import steploop.ops  # noqa: F401  (loads torch.ops.steploop)


@pytest.fixture(scope="module", params=["portable", "avx512"], autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The operators read STEPLOOP_CPU_ISA at every call."""
    before = os.environ.get("STEPLOOP_CPU_ISA")
    os.environ["STEPLOOP_CPU_ISA"] = request.param
    try:
        try:
            torch.ops.steploop.rms_norm(torch.ones(1, 1), torch.ones(1), 1e-5)
        except RuntimeError as error:
            pytest.skip(str(error))
        yield request.param
    finally:
        if before is None:
            del os.environ["STEPLOOP_CPU_ISA"]
        else:
            os.environ["STEPLOOP_CPU_ISA"] = before
