# The wheel, installed in a fresh environment that has torch and nothing else of ours.
from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MAX_WHEEL_BYTES = 20_000_000

pytestmark = pytest.mark.slow  # without `make test`, the wheel is built here


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # `make test` says where the wheel lies that it installed; otherwise one is built here.
    folder = ROOT / os.environ["STEPLOOP_TEST_WHEELS"] if "STEPLOOP_TEST_WHEELS" in os.environ else None
    if folder is None:
        folder = tmp_path_factory.mktemp("wheels")
        pip("wheel", "--no-build-isolation", "--no-deps", "-w", str(folder), str(ROOT))
    (path,) = folder.glob("steploop-*.whl")
    return path


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", *arguments], check=True)


def run(command: list[str | Path], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"steploop", f"steploop-{wheel.name.split('-')[1]}.dist-info"}
    for needed in ("steploop/__init__.py", "steploop/py.typed", "steploop/_C.pyi", "steploop/libsteploop_ops.so"):
        assert needed in names
    assert any(name.startswith("steploop/_C.") and name.endswith(".so") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.endswith((".cpp", ".h", ".a", ".pyc"))]


def test_wheel_runs_in_a_fresh_environment(wheel: Path, tiny_llama: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path).strip())
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    # Dependencies come from here; the new environment's own packages go first.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    where = run([python, "-c", "import steploop, steploop._C as native; print(native.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(site)
    steploop = environment / "bin" / "steploop"
    assert run([steploop, "--version"], tmp_path) == f"steploop {importlib.metadata.version('steploop')}\n"
    line = run([steploop, "generate", tiny_llama, "abc", "--max-tokens", "4", "--ignore-eos", "--json"], tmp_path)
    assert line.count("\n") == 1
    assert isinstance(json.loads(line), dict)
