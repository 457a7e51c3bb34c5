"""`steploop generate` as a person or a script runs it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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


def test_several_answers(tiny_llama: Path, capsys: Capture) -> None:
    options = ["--temperature", "1.5", "--seed", "3", "--max-tokens", "9", "-n", "3"]
    assert generate(tiny_llama, *options, "--json", "hello", "wörld") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted((record["index"], record["sample"]) for record in records) == [
        (prompt, sample) for prompt in range(2) for sample in range(3)
    ]
    assert len({record["text"] for record in records if record["index"] == 0}) == 3
    assert all(len(record["token_ids"]) == 9 for record in records)
    for prompts in (["hello"], ["hello", "wörld"]):
        assert generate(tiny_llama, *options, *prompts) == 0
        out = capsys.readouterr().out
        for record in records:
            if record["index"] < len(prompts):
                title = f"{record['index'] + 1}/{len(prompts)}, sample {record['sample'] + 1}/3: {record['prompt']}"
                assert f"--- {title}\n{record['text']}\n\n" in out
        assert out.count("--- ") == 3 * len(prompts)


def test_what_changes_the_logits_and_stops(tiny_llama: Path, capsys: Capture) -> None:
    def record(*more: str) -> dict[str, Any]:
        assert generate(tiny_llama, "--json", "--max-tokens", "20", *more, "hello") == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    plain = record()
    letter = next(text for text in plain["text"] if text.isalpha())
    stopped = record("--stop", "never", "--stop", letter)
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == plain["text"][: plain["text"].index(letter)]
    assert letter not in record("--bad-word", letter)["text"]
    for option in ("--repetition-penalty", "--presence-penalty", "--frequency-penalty"):
        assert record(option, "1.9")["token_ids"] != plain["token_ids"]
    draws = ["--temperature", "3", "--seed", "1"]
    assert record(*draws, "--min-p", "0.9")["token_ids"] != record(*draws)["token_ids"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--scheduling-policy", "estimate", "--queue-order", "shortest_first", "--no-prefix-caching"],
        ["--preemption-mode", "swap", "--swap-space-bytes", "100000", "--target-step-duration-ms", "5"],
        ["--scheduling-policy", "static", "--no-chunked-prefill"],
    ],
)
def test_scheduling_changes_no_token(tiny_llama: Path, capsys: Capture, arguments: list[str]) -> None:
    def texts(*more: str) -> dict[str, str]:
        assert generate(tiny_llama, "--json", "--max-tokens", "9", *more, "hello", "wörld 2") == 0
        records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return {record["prompt"]: record["text"] for record in records}

    assert texts(*arguments) == texts()


def test_cached_tokens(tiny_llama: Path, capsys: Capture) -> None:
    """The second prompt finds the first one's blocks; without caching it does not."""
    prompts = ["a" * 40, "a" * 40]

    def num_cached(*more: str) -> list[int]:
        assert generate(tiny_llama, "--json", "--max-tokens", "1", *more, *prompts) == 0
        return sorted(json.loads(line)["num_cached_tokens"] for line in capsys.readouterr().out.splitlines())

    assert num_cached() == [0, 32]
    assert num_cached("--no-prefix-caching") == [0, 0]


def test_trace(tiny_llama: Path, tmp_path: Path, capsys: Capture, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    assert generate(tiny_llama, "--max-tokens", "3", "--trace", str(path), "hello", "wörld") == 0
    events = json.loads(path.read_text(encoding="utf-8"))
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {"0", "1"}
    assert {"queued", "prompt", "decode", "end"} <= {event["name"] for event in events}
    if Path("/dev/full").exists():
        assert generate(tiny_llama, "--max-tokens", "3", "--trace", "/dev/full", "hello") == 0
        assert "the trace is not whole" in caplog.text


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
        (["--min-p", "2", "x"], "min_p must be in"),
        (["--repetition-penalty", "0", "x"], "repetition_penalty must be > 0"),
        (["--presence-penalty", "3", "x"], "presence_penalty must be in"),
        (["--frequency-penalty", "nan", "x"], "frequency_penalty must be finite"),
        (["--stop", "", "x"], "each of stop must be"),
        (["--bad-word", "", "x"], "each of bad_words must be"),
        (["--file", "/no/such/file"], "cannot be read"),
        (["--file", "f", "x"], "not both"),
        (["--system", "s", "x"], "--system needs --chat"),
        (["--device", "cuda", "x"], ""),
        (["--max-model-len", "9999", "x"], "max_model_len must be <= 512, got 9999"),
        (["x", "y" * 600], "fewer than max_model_len=512 tokens, got 601"),
        (["--kv-cache-memory-bytes", "100", "x"], "too little"),
        (["-n", "0", "x"], "n must be >= 1, got 0"),
        (["-n", "9", "x"], "n must be <= max_num_seqs=8"),
        (["--swap-space-bytes", "9", "x"], "swap_space_bytes=9 is for preemption_mode swap or auto"),
        (["--no-chunked-prefill", "--target-step-duration-ms", "5", "x"], "cuts prompts into chunks"),
        (["--no-chunked-prefill", "--max-num-batched-tokens", "511", "x"], "got 511 and 512"),
        (["--target-step-duration-ms", "nan", "x"], "target_step_duration_ms must be"),
        (["--trace", "/no/such/folder/t.json", "x"], "/no/such/folder/t.json"),
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


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["generate"],
        ["nonsense"],
        ["generate", "m", "--bogus"],
        ["generate", "m", "--scheduling-policy", "magic", "x"],
        ["generate", "m", "--queue-order", "lifo", "x"],
        ["generate", "m", "--preemption-mode", "kill", "x"],
        ["demo", "extra"],
    ],
)
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--choice", "yes", "--choice", "no"], r"yes|no"),
        (["--regex", "[0-9]{3}"], r"\d\d\d"),
        (["--grammar", 'root ::= "a" | "b"'], r"a|b"),
        (["--json-schema", '{"enum": ["left", 3]}'], r'"left"|3'),
    ],
)
def test_output_of_a_form(tiny_llama: Path, capsys: Capture, options: list[str], expected: str) -> None:
    assert main(["generate", str(tiny_llama), "--num-threads", "1", *options, "x"]) == 0
    assert re.fullmatch(expected, capsys.readouterr().out.removesuffix("\n"))


def test_forms_that_are_refused(tiny_llama: Path, capsys: Capture) -> None:
    assert main(["generate", str(tiny_llama), "--num-threads", "1", "--regex", "[a", "x"]) == 1
    assert "cannot be compiled: Regex parsing error" in capsys.readouterr().err
    assert main(["generate", str(tiny_llama), "--regex", "a", "--choice", "a", "x"]) == 1
    assert "got regex and choice" in capsys.readouterr().err


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
