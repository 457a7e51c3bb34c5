"""`steploop pack` as a person or a script runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steploop.cli import main

Capture = pytest.CaptureFixture[str]


def answers(model: Path, capsys: Capture) -> list[object]:
    options = ["--json", "--temperature", "0", "--max-tokens", "9", "--ignore-eos", "--logprobs", "1"]
    assert main(["generate", str(model), *options, "hello", "wörld"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return sorted((record["prompt"], record["text"], str(record["logprobs"])) for record in records)


def test_pack_then_generate(tiny_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["pack", str(tiny_llama), str(tmp_path / "packed")]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path / 'packed'}: ") and " KiB in " in line and line.endswith(" s")
    assert answers(tmp_path / "packed", capsys) == answers(tiny_llama, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/no/such/model", "FOLDER"], "no file or folder '/no/such/model'"),
        (["MODEL", "MODEL"], "must be a new folder, an empty one, or a packed model to replace"),
        (["MODEL", "/dev/null/x"], "/dev/null/x"),
    ],
)
def test_errors(tiny_llama: Path, tmp_path: Path, capsys: Capture, arguments: list[str], words: str) -> None:
    names = {"MODEL": str(tiny_llama), "FOLDER": str(tmp_path / "packed")}
    assert main(["pack", *(names.get(argument, argument) for argument in arguments)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("steploop: error: ") and words in err
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--dtype", "bfloat16"], "packed in float32, got dtype bfloat16"),
        (["--device", "cuda"], "packed for device cpu, got device cuda"),
    ],
)
def test_what_a_packed_model_cannot(
    tiny_llama: Path, tmp_path: Path, capsys: Capture, option: list[str], words: str
) -> None:
    assert main(["pack", str(tiny_llama), str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["generate", str(tmp_path), *option, "hello"]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["m"], ["m", "f", "x"], ["m", "f", "--dtype", "int8"]])
def test_usage(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as error:
        main(["pack", *arguments])
    assert error.value.code == 2
    assert "usage: steploop" in capsys.readouterr().err
