# Build options that cannot be honoured stop the configuration and say why.
from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("STEPLOOP_CUDA=ON", "has no CUDA backend"),
        ("STEPLOOP_CUDA=maybe", "STEPLOOP_CUDA must be AUTO, ON or OFF, got"),
        ("STEPLOOP_SANITIZE=adress", "STEPLOOP_SANITIZE must be empty"),
    ],
)
def test_bad_option_is_refused(option: str, message: str, tmp_path: Path) -> None:
    command = ["cmake", "-S", ROOT, "-B", tmp_path, f"-D{option}", "-DSTEPLOOP_BUILD_PYTHON=OFF"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())
