"""bench/peers/install.py: environments and models are made once, and what fails is told. No network is used."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

WORKER = """
from importlib.metadata import version
from worker import RunTimes, serve
import stand_in

class StandIn:
    def __init__(self, settings):
        self.slots = settings["max_num_seqs"]
    def about(self):
        return {"versions": {"stand-in": version("stand-in")}, "dtype": "none", "num_threads": 1}
    def run(self, requests):
        if stand_in.MOST_SLOTS < self.slots:
            raise SystemExit("too many slots")
        run = RunTimes()
        run.duration = 1.0
        run.first_token_times, run.last_token_times = [0.25] * len(requests), [0.75] * len(requests)
        run.token_ids = [[7] * request.num_output_tokens for request in requests]
        return run

serve(StandIn)
"""


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, and from nowhere else. It has one: stand-in 1.0."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "stand_in-1.0.dist-info"
    files = {
        "stand_in.py": "MOST_SLOTS = 8\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: stand-in\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / "stand_in-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(folder), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return folder


@pytest.fixture
def peers(bench_peers: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only peers: "stand-in", and "missing", which needs a package that nobody has. Returns their folder."""
    import catalog

    (tmp_path / "stand_in_worker.py").write_text(WORKER)
    worker = str(tmp_path / "stand_in_worker.py")
    for table in (catalog.PEERS, catalog.ENVIRONMENTS, catalog.MODEL_FORMATS):
        for name in list(table):
            monkeypatch.delitem(table, name)
    note = ("python", "-c", "import stand_in; open('built', 'a').write('once ')")
    environments = {
        "stand-in": catalog.Environment(("stand-in==1.0",), build=(note,)),
        "missing": catalog.Environment(("no-such-package==3.1",)),
    }
    formats = {
        "copy": catalog.ModelFormat("stand-in", ("cp", "-r", "{hf}", "{output}")),
        "broken": catalog.ModelFormat("stand-in", ("python", "-c", "print('no such format'); exit(3)", "{hf}")),
        "from-gguf": catalog.ModelFormat("stand-in", ("cp", "{gguf}", "{output}")),
        "unmade": catalog.ModelFormat("stand-in", ("no-such-program", "{hf}", "{output}")),
    }
    peers = {
        "stand-in": catalog.Peer("stand-in", worker, "copy", "bfloat16", 1),
        "missing": catalog.Peer("missing", worker, "hf", "bfloat16", 1),
    }
    for table, entries in (
        (catalog.ENVIRONMENTS, environments),
        (catalog.MODEL_FORMATS, formats),
        (catalog.PEERS, peers),
    ):
        for name, entry in entries.items():
            monkeypatch.setitem(table, name, entry)
    return tmp_path / "peers"


def test_from_end_to_end(peers: Path, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One peer is installed, loses its larger slot count and is measured; the other is reported."""
    from compare import main

    output = tmp_path / "peers.json"
    arguments = ["--model", str(tiny_llama), "--folder", str(peers), "--output", str(output), "--threads", "1"]
    small = ["--num-requests", "2", "--max-output", "8", "--wait-quiet", "0", "--slots", "8,32"]
    assert main([*arguments, *small, "--workloads", "mixed"]) == 1

    entries: dict[str, Any] = json.loads(output.read_text())
    assert str(tmp_path) not in output.read_text()
    entry = entries["bfloat16/stand-in mixed"]
    assert "too many slots" in entry["search"][1]["failure"]
    [configuration] = entry["configurations"]
    assert configuration["slots"] == 8 and configuration["engines"]["stand-in"]["versions"] == {"stand-in": "1.0"}
    assert configuration["peer"]["throughput"][0] == 16 and configuration["peer"]["ttft_p50"][0] == 0.25
    assert configuration["ratio"]["median"] > 0

    failure = entries["bfloat16/missing mixed"]["failure"]
    assert failure["command"].startswith("python -m pip") and "no-such-package==3.1" in failure["command"]
    assert any("No matching distribution found for no-such-package==3.1" in line for line in failure["output"])
    printed = capsys.readouterr().out
    assert "bfloat16/missing: NOT INSTALLED; this failed: python -m pip" in printed
    assert "No matching distribution found for no-such-package==3.1" in printed
    assert "bfloat16/stand-in, 8 slots: " in printed and "too many slots" in printed


def test_install_only(peers: Path, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from compare import main

    output = tmp_path / "peers.json"
    arguments = ["--model", str(tiny_llama), "--folder", str(peers), "--output", str(output), "--install-only"]
    assert main([*arguments, "--pairs", "stand-in"]) == 0
    assert capsys.readouterr().out.strip() == ""
    assert main([*arguments, "--pairs", "stand-in"]) == 0
    assert (peers / "stand-in" / "built").read_text() == "once "
    found = subprocess.run([peers / "stand-in" / "bin" / "python", "-c", "import stand_in"], cwd=tmp_path)
    assert found.returncode == 0
    assert (peers / "models" / tiny_llama.name / "copy" / "config.json").is_file()
    assert main([*arguments, "--pairs", "missing"]) == 1
    assert "NOT INSTALLED" in capsys.readouterr().out and not output.exists()


def test_another_recipe_is_installed_again(peers: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import catalog
    from install import Installer

    folder = Installer(peers, tiny_llama).environment("stand-in")
    again = ("python", "-c", "open('built', 'a').write('twice')")
    monkeypatch.setitem(catalog.ENVIRONMENTS, "stand-in", catalog.Environment(("stand-in==1.0",), build=(again,)))
    assert Installer(peers, tiny_llama).environment("stand-in") == folder
    assert (folder / "built").read_text() == "once twice"


def test_models_that_cannot_be_made(peers: Path, tiny_llama: Path) -> None:
    from install import CommandError, Installer

    installer = Installer(peers, tiny_llama)
    for name, command, line in [
        ("from-gguf", "cp '{gguf}'", f"needs a GGUF file, got the folder {tiny_llama.name}"),
        ("broken", "python -c", "no such format"),
        ("unmade", "no-such-program", "No such file or directory"),
    ]:
        errors = []
        for _ in range(2):
            with pytest.raises(CommandError, match="failed") as caught:
                installer.model(name)
            errors.append(caught.value)
        assert errors[0] is errors[1]  # it was tried once
        assert errors[0].command.startswith(command) and any(line in told for told in errors[0].output)
        assert str(peers) not in " ".join([errors[0].command, *errors[0].output])
        assert not (peers / "models" / tiny_llama.name / name).exists()


def test_a_gguf_file_is_exported(bench_peers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import install

    (tmp_path / "export.py").write_text(
        "import pathlib, sys\nfolder, _, model = sys.argv[1:]\n"
        "pathlib.Path(folder).mkdir()\n(pathlib.Path(folder) / 'config.json').write_text(model)\n"
    )
    monkeypatch.setattr(install, "EXPORT_HF", tmp_path / "export.py")
    (tmp_path / "small.Q4_1.gguf").touch()
    installer = install.Installer(tmp_path / "peers", tmp_path / "small.Q4_1.gguf")
    folder = installer.model("hf")
    assert folder == tmp_path / "peers" / "models" / "small.Q4_1" / "hf"
    assert (folder / "config.json").read_text() == str(tmp_path / "small.Q4_1.gguf")
    assert installer.model("hf") == folder
