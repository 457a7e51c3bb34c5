"""Every kernel test runs once per instruction set."""

import os
from collections.abc import Iterator

import pytest

import steploop.ops  # noqa: F401  (loads torch.ops.steploop)


@pytest.fixture(scope="module", params=["portable", "avx512"], autouse=True)
def isa(request: pytest.FixtureRequest, cpu_has_avx512: bool) -> Iterator[str]:
    """The operators read STEPLOOP_CPU_ISA at every call."""
    if request.param == "avx512" and not cpu_has_avx512:
        pytest.skip("needs a processor with AVX-512 BF16 and VNNI")
    before = os.environ.get("STEPLOOP_CPU_ISA")
    os.environ["STEPLOOP_CPU_ISA"] = request.param
    try:
        yield request.param
    finally:
        if before is None:
            del os.environ["STEPLOOP_CPU_ISA"]
        else:
            os.environ["STEPLOOP_CPU_ISA"] = before
