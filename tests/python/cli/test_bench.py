"""`steploop bench` as a person or a script runs it: in process, and against a scripted server."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steploop.cli import main
from steploop.loadtest.arguments import EPILOG

from ..loadtest.fake_server import FakeServer, answer

ENGINE = ["--num-threads", "1", "--max-num-seqs", "4", "--max-model-len", "256"]
SMALL = ["--num-requests", "5", "--prompt-lengths", "uniform:3:9", "--output-lengths", "uniform:2:6"]

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def report(capsys: Capture, *arguments: str, code: int = 0) -> dict[str, Any]:
    """What `bench ... --json -` says."""
    assert main(["bench", *arguments, "--json", "-"]) == code
    loaded: dict[str, Any] = json.loads(capsys.readouterr().out)
    return loaded


def test_in_process(tiny_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    picture, figures = tmp_path / "a.svg", tmp_path / "a.json"
    paths = ["--plot", str(picture), "--json", str(figures)]
    slo = ["--slo", "ttft=1000,itl=1000"]
    assert main(["bench", str(tiny_llama), *ENGINE, *SMALL, "--arrivals", "poisson:50", *slo, *paths]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out  # no terminal, no colours
    for words in (
        "5 of 5 requests completed",
        "goodput: ",
        "5 of 5 (100.0%) within ttft 1000 s, itl 1000 s",
        "time to first token (TTFT)",
        "Queue time: RequestOutput.metrics.",
        "steps: ",
        "prompt_format: token_ids",
    ):
        assert words in out
    ET.fromstring(picture.read_text(encoding="utf-8"))
    report = json.loads(figures.read_text(encoding="utf-8"))
    [run] = report["runs"]
    assert run["rate"] == 50
    assert run["requests"] == {"asked": 5, "completed": 5, "failed": 0, "unfinished": 0, "not_sent": 0}
    assert run["lengths"]["output_got"] == run["lengths"]["output_asked"] == run["workload"]["output_tokens"]
    assert run["lengths"]["prompt_got"] == run["lengths"]["prompt_asked"] == run["workload"]["prompt_tokens"]
    assert [record["state"] for record in run["records"]] == ["completed"] * 5
    assert report["workload"]["prompt_lengths"] == "uniform:3:9"
    assert report["target"]["max_num_seqs"] == 4


def test_text_in_process(tiny_llama: Path, capsys: Capture) -> None:
    """The tiny tokenizer has a token for each letter: what was asked for and what it became are both told."""
    [run] = report(capsys, str(tiny_llama), *ENGINE, *SMALL, "--prompt-format", "text")["runs"]
    assert run["lengths"]["prompt_got"]["total"] > 2 * run["lengths"]["prompt_asked"]["total"]


def test_server(server: FakeServer, capsys: Capture) -> None:
    server.script = answer(tokens_per_chunk=2, empty_chunks=1)
    loaded = report(capsys, "--url", server.url, *SMALL, "--num-warmups", "2", "--max-concurrency", "2")
    [run] = loaded["runs"]
    assert run["requests"]["completed"] == 5
    assert run["lengths"]["output_got"] == run["lengths"]["output_asked"]
    assert run["in_flight"]["max"] <= 2
    assert loaded["target"] == {
        "model": "fake",
        "prompt_format": "token_ids",
        "url": server.url,
        "endpoint": "completions",
    }
    assert len(server.bodies) == 2 + 5
    prompts = [body["prompt"] for body in server.bodies]
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    # Warm-ups put nothing into a prefix cache that a request could find.
    assert not [prompt for prompt in prompts[2:] if prompt[:3] in [warmup[:3] for warmup in prompts[:2]]]
    assert run["queue_time"]["mean"] is None
    assert "the server has no /metrics" in run["queue_time"]["source"]


def test_chat_and_text(server: FakeServer, capsys: Capture) -> None:
    report(capsys, "--url", server.url, *SMALL, "--endpoint", "chat", "--extra-body", '{"top_p": 0.5}')
    assert all(isinstance(body["messages"][0]["content"], str) for body in server.bodies)
    assert {body["top_p"] for body in server.bodies} == {0.5}
    server.bodies.clear()
    server.models = [{"id": "fake"}]  # does not say how large its vocabulary is
    assert report(capsys, "--url", server.url, *SMALL)["target"]["prompt_format"] == "text"
    assert isinstance(server.bodies[0]["prompt"], str)
    assert report(capsys, "--url", server.url, *SMALL, "--vocab-size", "50")["target"]["prompt_format"] == "token_ids"


def test_tokenizer_gives_the_vocabulary(server: FakeServer, tiny_llama: Path, capsys: Capture) -> None:
    report(capsys, "--url", server.url, *SMALL, "--tokenizer", str(tiny_llama), "--model", "mine")
    assert all(token < 262 for body in server.bodies for token in body["prompt"])
    assert {body["model"] for body in server.bodies} == {"mine"}


def test_sweep(server: FakeServer, tmp_path: Path, capsys: Capture) -> None:
    picture = tmp_path / "a.html"
    arguments = ["--url", server.url, *SMALL, "--rate-sweep", "20,50", "--slo", "e2e=100", "--plot", str(picture)]
    loaded = report(capsys, *arguments, "--num-warmups", "0")
    assert [run["rate"] for run in loaded["runs"]] == [20, 50]
    # The same lengths, and no prompt twice.
    slow, fast = server.bodies[:5], server.bodies[5:]
    assert sorted(body["max_tokens"] for body in slow) == sorted(body["max_tokens"] for body in fast)
    assert not [body for body in fast if body["prompt"] in [other["prompt"] for other in slow]]
    durations = [run["workload"]["arrivals"]["duration"] for run in loaded["runs"]]
    assert durations[0] == pytest.approx(2.5 * durations[1])
    assert "<svg" in picture.read_text(encoding="utf-8")
    assert main(["bench", *arguments]) == 0
    assert "By rate of arrivals" in capsys.readouterr().out


def test_recorded(server: FakeServer, tmp_path: Path, capsys: Capture) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 7.0 + i / 50, "prompt_tokens": 3 + i, "output_tokens": 1 + i} for i in range(4)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    arguments = ["--url", server.url, "--lengths-file", str(trace), "--arrivals", f"file:{trace}"]
    [run] = report(capsys, *arguments, "--num-warmups", "0")["runs"]
    assert run["requests"]["completed"] == 4
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies) == [
        (3, 1),
        (4, 2),
        (5, 3),
        (6, 4),
    ]
    assert main(["bench", *arguments, "--num-requests", "5"]) == 1
    assert "trace.jsonl has lengths for 4 requests, not for the 5 asked for" in capsys.readouterr().err


def test_conversations(server: FakeServer, capsys: Capture) -> None:
    arguments = [
        "--url",
        server.url,
        *SMALL,
        "--arrivals",
        "poisson:50",
        "--turns",
        "fixed:2",
        "--think-time",
        "fixed:0.1",
    ]
    arguments += ["--shared-prefix", "20", "--tenants", "3", "--priorities", "2", "--num-warmups", "1"]
    [run] = report(capsys, *arguments)["runs"]
    assert run["requests"]["completed"] == 5
    assert run["workload"]["conversations"] == {"count": 3, "mean_turns": 5 / 3, "max_turns": 2}
    assert run["workload"]["known_prompt_tokens"]["share"] > 0.5
    warmup, *bodies = server.bodies
    prompts = [body["prompt"] for body in bodies]
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert warmup["prompt"][:20] != prompts[0][:20]
    # Second turns begin with a first one.
    assert sum(any(len(a) < len(b) and b[: len(a)] == a for a in prompts) for b in prompts) == 2
    assert {body["tenant"] for body in bodies} <= {"tenant-0", "tenant-1", "tenant-2"}
    assert {body["priority"] for body in bodies} <= {0, 1}
    assert main(["bench", *arguments]) == 0
    out = capsys.readouterr().out
    for words in (
        "conversations: 3, turns: mean 1.7, max 2",
        "tenants: ",
        "prompt tokens that an earlier request had: ",
    ):
        assert words in out


def test_workload_file(server: FakeServer, tmp_path: Path, capsys: Capture) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("Timestamp,Model,Request tokens,Response tokens\n5,m,3,1\n5.1,m,4,2\n5.2,m,5,0\n9,m,6,3\n")
    arguments = ["--url", server.url, "--workload-file", str(trace), "--num-warmups", "0"]
    assert main(["bench", *arguments]) == 1
    assert "trace.csv:4: Request tokens and Response tokens must be >= 1, got 5 and 0" in capsys.readouterr().err
    loaded = report(capsys, *arguments, "--skip-empty", "--speedup", "20")
    assert loaded["workload"]["speedup"] == 20
    [run] = loaded["runs"]
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies) == [(3, 1), (4, 2), (6, 3)]
    assert run["workload"]["arrivals"]["duration"] == pytest.approx(0.2)
    assert run["workload"]["num_skipped"] == 1
    assert main(["bench", *arguments, "--skip-empty", "--rate-sweep", "20,40"]) == 0
    assert "recorded requests left out, without prompt or output tokens: 1" in capsys.readouterr().out


def test_tenants_and_bursts_in_process(tiny_llama: Path, capsys: Capture) -> None:
    arguments = [*ENGINE, *SMALL, "--arrivals", "mmpp:20:90:1:1", "--tenants", "2:1", "--priorities", "3"]
    assert main(["bench", str(tiny_llama), *arguments, "--queue-order", "fair"]) == 0
    out = capsys.readouterr().out
    assert "5 of 5 requests completed" in out
    assert "% of arrivals in bursts" in out


def test_shared_prefixes_are_in_the_prefix_cache(tiny_llama: Path, capsys: Capture) -> None:
    arguments = [*ENGINE, *SMALL, "--arrivals", "poisson:5", "--shared-prefix", "64", "--num-warmups", "0"]
    [run] = report(capsys, str(tiny_llama), *arguments)["runs"]
    assert run["prefix_cache"]["num_cached_tokens"] >= 3 * 48  # whole blocks, of those that came after the first answer
    known = run["workload"]["known_prompt_tokens"]["share"]
    assert 0 < run["prefix_cache"]["share_of_prompt_tokens"] <= known
    assert not [warning for warning in run["warnings"] if "prefix cache" in warning]


def test_exit_codes(server: FakeServer, capsys: Capture) -> None:
    from aiohttp import web

    num_bad = 3

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(server.bodies) <= num_bad:
            return web.Response(status=503, text="[red]busy[/red]")
        return await answer()(request, body)

    server.script = script
    arguments = ["--url", server.url, *SMALL, "--num-warmups", "0"]
    assert main(["bench", *arguments]) == 0
    out = capsys.readouterr().out
    assert "2 of 5 requests completed" in out
    assert "http_503: 3, such as: [red]busy[/red]" in out
    assert "warning: 3 of 5 requests failed" in out
    num_bad = 100
    [run] = report(capsys, *arguments, code=1)["runs"]
    assert run["errors"]["http_503"]["count"] == 5
    assert main(["bench", "--url", server.url, *SMALL]) == 1
    assert "a warm-up request failed (http_503): [red]busy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give MODEL to test in process, or --url of a server, got neither"),
        (["m", "--url", "http://a"], "got both"),
        (["m", "--api-key", "k"], "--api-key is for a test with --url"),
        (["m", "--model", "k"], "--model is for a test with --url"),
        (["m", "--endpoint", "chat"], "--endpoint is for a test with --url"),
        (["--url", "http://a", "--num-threads", "2"], "--num-threads is for a test with MODEL"),
        (["--url", "http://a", "--queue-order", "fair"], "--queue-order is for a test with MODEL"),
        (["--url", "a"], "url must be like http://127.0.0.1:8000"),
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1 cannot be reached"),
        (["--url", "http://a", "--extra-body", "{"], "--extra-body must be JSON"),
        (["--url", "http://a", "--extra-body", "[]"], "--extra-body must be a JSON object"),
        (["m", "--prompt-lengths", "gauss:3"], "must be one of fixed:N"),
        (["m", "--output-lengths", "fixed:0"], "must be >= 1, got 0"),
        (["m", "--lengths-file", "x.csv", "--prompt-lengths", "fixed:1"], "give --lengths-file, or"),
        (["m", "--lengths-file", "/no/such.csv"], "cannot be read"),
        (["m", "--arrivals", "poisson:0"], "the rate of arrivals must be a finite number > 0"),
        (["m", "--rate-sweep", "1,x"], "--rate-sweep must be numbers with commas between them, got '1,x'"),
        (["m", "--rate-sweep", "1,-1"], "the rate of arrivals must be a finite number > 0, got -1"),
        (["m", "--rate-sweep", "1", "--arrivals", "burst"], "--rate-sweep needs arrivals that have a rate, got burst"),
        (["m", "--num-requests", "0"], "num_requests must be >= 1, got 0"),
        (["m", "--num-warmups", "-1"], "--num-warmups must be >= 0, got -1"),
        (["m", "--max-concurrency", "0"], "--max-concurrency must be >= 1, got 0"),
        (["m", "--vocab-size", "0"], "--vocab-size must be >= 1, got 0"),
        (["m", "--timeout", "nan"], "--timeout must be a finite number > 0, got nan"),
        (["m", "--temperature", "-1"], "--temperature must be a finite number >= 0, got -1"),
        (["m", "--seed", "-1"], "seed must be >= 0, got -1"),
        (["m", "--slo", "speed=1"], "an SLO must be one of ttft=SECONDS"),
        (["m", "--plot", "a.pdf"], "--plot must be a .svg, .png, .html file"),
        (["m", "--json", "/no/such/folder/a.json"], "--json /no/such/folder/a.json cannot be written"),
        (["/no/such/model"], "/no/such/model"),
    ],
)
def test_refused(arguments: list[str], words: str, capsys: Capture) -> None:
    assert main(["bench", *arguments]) == 1
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_token_ids_that_cannot_be(server: FakeServer, capsys: Capture) -> None:
    arguments = ["bench", "--url", server.url, "--prompt-format", "token_ids"]
    assert main([*arguments, "--endpoint", "chat"]) == 1
    assert "--prompt-format must be text for chat, got token_ids" in capsys.readouterr().err
    server.models = [{"id": "fake"}]
    assert main(arguments) == 1
    assert "--prompt-format token_ids needs --vocab-size or --tokenizer" in capsys.readouterr().err


def test_missing_packages(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--url", "http://a"]) == 1
    assert "--url needs aiohttp; install it with: pip install 'steploop[bench]'" in capsys.readouterr().err


def test_help_is_whole(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert " ".join(EPILOG.split()) in out
    assert "poisson:RATE" in out


@pytest.mark.parametrize("arrivals", ["burst", "poisson:0.001"])
def test_interrupted(server: FakeServer, tmp_path: Path, arrivals: str) -> None:
    """Ctrl-C reports what there is, in flight and not yet sent."""

    async def script(request: Any, body: dict[str, Any]) -> Any:
        await asyncio.sleep(0 if len(server.bodies) == 1 else 60)
        return await answer()(request, body)

    server.script = script
    figures = tmp_path / "a.json"
    command = [sys.executable, "-m", "steploop", "bench", "--url", server.url, *SMALL, "--arrivals", arrivals]
    command += ["--num-warmups", "0", "--json", str(figures)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    num_sent = 5 if arrivals == "burst" else 1
    for _ in range(1200):
        if len(server.bodies) == num_sent or process.poll() is not None:
            break
        time.sleep(0.05)
    time.sleep(1.5)  # the first is answered meanwhile
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "INCOMPLETE, interrupted: 1 of 5 requests completed" in out
    assert "Traceback" not in err
    [run] = json.loads(figures.read_text(encoding="utf-8"))["runs"]
    assert run["incomplete"] is True
    assert run["requests"]["completed"] == 1
    assert run["requests"]["unfinished"] == num_sent - 1
    assert run["requests"]["not_sent"] == 5 - num_sent
