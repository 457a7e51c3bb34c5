"""Every kernel test runs once per instruction set."""

import os
from collections.abc import Callable, Iterator

import pytest

import steploop.ops  # noqa: F401  (loads torch.ops.steploop)


@pytest.fixture(scope="module", params=["portable", "avx2", "avxvnni", "avx512vnni", "avx512"], autouse=True)
def isa(request: pytest.FixtureRequest, needs_isa: Callable[[str], None]) -> Iterator[str]:
    """The operators read STEPLOOP_CPU_ISA at every call."""
    needs_isa(request.param)
    before = os.environ.get("STEPLOOP_CPU_ISA")
    os.environ["STEPLOOP_CPU_ISA"] = request.param
    try:
        yield request.param
    finally:
        if before is None:
            del os.environ["STEPLOOP_CPU_ISA"]
        else:
            os.environ["STEPLOOP_CPU_ISA"] = before
