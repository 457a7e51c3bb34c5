# Build options that cannot be honoured stop the configuration and say why.
from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("STEPLOOP_CUDA=ON", "STEPLOOP_CUDA=ON: no nvcc found"),
        ("STEPLOOP_CUDA=maybe", "STEPLOOP_CUDA must be AUTO, ON or OFF, got"),
        ("STEPLOOP_SANITIZE=adress", "STEPLOOP_SANITIZE must be empty"),
    ],
)
def test_bad_option_is_refused(option: str, message: str, tmp_path: Path) -> None:
    command = ["cmake", "-S", ROOT, "-B", tmp_path, f"-D{option}", "-DSTEPLOOP_BUILD_PYTHON=OFF"]
    # No compiler by that name: as on a machine without nvcc.
    environment = os.environ | {"CUDACXX": "no-such-nvcc"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())
