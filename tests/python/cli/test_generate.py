"""`steploop generate` as a person or a script runs it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steploop.cli import main
from steploop.text import printable, shorten

OPTIONS = ["--max-num-seqs", "8", "--num-threads", "1", "--temperature", "0", "--ignore-eos"]

Capture = pytest.CaptureFixture[str]


def generate(model: Path, *arguments: str) -> int:
    return main(["generate", str(model), *OPTIONS, *arguments])


def test_one_prompt_streams(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorder(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.num_flushes = 0

        def flush(self) -> None:
            self.num_flushes += 1

    recorder = Recorder()
    monkeypatch.setattr(sys, "stdout", recorder)
    assert generate(tiny_llama, "--max-tokens", "9", "hello") == 0
    assert recorder.num_flushes >= 9
    assert recorder.getvalue().endswith("\n")


def test_same_text_in_every_form(
    tiny_llama: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed, in blocks, as JSON; from arguments, a file and standard input."""

    def run(*arguments: str) -> str:
        assert generate(tiny_llama, "--max-tokens", "9", *arguments) == 0
        return capsys.readouterr().out

    streamed = {prompt: run(prompt).removesuffix("\n") for prompt in ("hello", "wörld 2")}
    blocks = run("hello", "wörld 2")
    for number, (prompt, text) in enumerate(streamed.items(), start=1):
        assert f"--- {number}/2: {prompt}\n{text}\n\n" in blocks
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffhello\r\n\n  \nwörld 2".encode())  # as an editor on Windows may
    assert run("--file", str(file)) == blocks
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufeffhello\nwörld 2\n".encode())))
    assert run() == blocks
    records = [json.loads(line) for line in run("--json", "hello", "wörld 2").splitlines()]
    assert {record["prompt"]: record["text"] for record in records} == streamed


def test_json(tiny_llama: Path, capsys: Capture) -> None:
    assert generate(tiny_llama, "--json", "--max-tokens", "3", "--logprobs", "2", "hello") == 0
    [line] = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert (record["index"], record["prompt"], record["num_prompt_tokens"]) == (0, "hello", 6)
    assert len(record["token_ids"]) == len(record["logprobs"]) == 3
    for token, entry in zip(record["token_ids"], record["logprobs"], strict=True):
        assert {"logprob", "rank", "decoded_token"} == entry[str(token)].keys()
    assert record["finish_reason"] == "length"
    assert record["metrics"]["num_generation_tokens"] == 3


def test_chat(tiny_llama: Path, capsys: Capture) -> None:
    assert generate(tiny_llama, "--json", "--max-tokens", "1", "--chat", "--system", "be good", "hi") == 0
    record = json.loads(capsys.readouterr().out)
    # <s> <|system|> be good </s> <|user|> hi </s> <|assistant|>
    assert record["num_prompt_tokens"] == 1 + 1 + 7 + 1 + 1 + 2 + 1 + 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-tokens", "0", "x"], "max_tokens must be >= 1, got 0"),
        (["--temperature", "nan", "x"], "temperature must be finite"),
        (["--top-p", "0", "x"], "top_p must be in"),
        (["--file", "/no/such/file"], "cannot be read"),
        (["--file", "f", "x"], "not both"),
        (["--system", "s", "x"], "--system needs --chat"),
        (["--device", "cuda", "x"], ""),
        (["--max-model-len", "9999", "x"], "max_model_len must be <= 512, got 9999"),
        (["x", "y" * 600], "at most max_model_len=512 tokens, got 601"),
        (["--kv-cache-memory-bytes", "100", "x"], "too little"),
    ],
)
def test_errors(tiny_llama: Path, capsys: Capture, arguments: list[str], words: str) -> None:
    assert generate(tiny_llama, *arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("steploop: error: ")
    assert words in err


def test_no_model_there(capsys: Capture) -> None:
    assert main(["generate", "/no/such/model", "x"]) == 1
    assert "no file or folder '/no/such/model'" in capsys.readouterr().err


def test_no_prompt(tiny_llama: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b" \n\n")))
    assert generate(tiny_llama) == 1
    assert "standard input holds no prompt" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    assert generate(tiny_llama) == 1
    assert "cannot be read from standard input" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["generate"], ["nonsense"], ["generate", "m", "--bogus"], ["demo", "extra"]])
def test_wrong_usage(capsys: Capture, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: steploop" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["m", "--max-tokens", "3", "x", "y"], ["m", "x", "--max-tokens", "3", "y"], ["--max-tokens", "3", "m", "x", "y"]],
)
def test_options_may_stand_anywhere(arguments: list[str]) -> None:
    from steploop.cli import make_parser

    parsed = make_parser().parse_args(["generate", *arguments])
    assert (parsed.model, parsed.prompts, parsed.max_tokens) == ("m", ["x", "y"], 3)


def test_version_and_help(capsys: Capture) -> None:
    import steploop

    for arguments, words in (
        (["--version"], f"steploop {steploop.__version__}\n"),
        (["--help"], "generate"),
        (["generate", "--help"], "--max-tokens"),
        (["demo", "--help"], "--picture"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert words in capsys.readouterr().out


def start(model: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "steploop", "generate", str(model), *OPTIONS, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_reader_that_goes_away(tiny_llama: Path) -> None:
    process = start(tiny_llama, "--max-tokens", "400", "hello")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""


def test_ctrl_c(tiny_llama: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("hello\n" * 3000)
    process = start(tiny_llama, "--max-tokens", "400", "--file", str(prompts))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()  # the first of 3000 is done
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.stdout.read()
    assert process.wait(timeout=60) == 130
    assert process.stderr.read() == b""


def test_shorten() -> None:
    assert shorten("a\n b", 5) == "a b"
    assert shorten("abcdef", 5) == "abcd…"
    assert shorten("abcde", 5) == "abcde"
    assert shorten("a\x1b[31mb", 9) == "a\ufffd[31mb"


def test_a_terminal_does_not_obey_the_model() -> None:
    assert printable("a\tb\nc\x1b[2J\x07\x9bd\r") == "a\tb\nc\ufffd[2J\ufffd\ufffdd\ufffd"
