"""Start and end: options that cannot be, ports in use, signals."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from steploop.cli import main


def test_sigterm_lets_requests_end(tiny_llama: Path, serve: Any) -> None:
    with serve(tiny_llama, "--num-threads", "1") as server:
        answers: list[httpx.Response] = []
        body = {"prompt": "hello", "max_tokens": 480, "ignore_eos": True}
        threads = [
            threading.Thread(
                target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        while True:
            now = server.client.get("/status").json()["now"]
            if now["running"] + now["waiting"] + now["finished"] == len(threads):
                break
            time.sleep(0.01)
        assert server.stop() == 0
        for thread in threads:
            thread.join()
    assert len(answers) == len(threads)
    assert all(answer.json()["usage"]["completion_tokens"] == 480 for answer in answers)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_requests_that_take_too_long_are_ended(demo_model: Path, serve: Any) -> None:
    with serve(demo_model, "--drain-timeout", "1", "--max-model-len", "4096") as server:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            parts = response.iter_text()
            next(parts)
            server.process.send_signal(signal.SIGTERM)
            rest = "".join(parts)
        assert rest.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"abort"' in rest
        assert server.process.wait(timeout=30) == 0


def test_ctrl_c(tiny_llama: Path, serve: Any) -> None:
    with serve(tiny_llama, "--num-threads", "1") as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=30) == 0


def test_a_port_in_use(tiny_llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "steploop", "serve", str(tiny_llama), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "--port must be <= 65535, got 70000"),
        (["--max-body-bytes", "0"], "--max-body-bytes must be >= 1"),
        (["--max-choices", "0"], "--max-choices must be >= 1"),
        (["--max-num-queued-requests", "-1"], "--max-num-queued-requests must be >= 0"),
        (["--drain-timeout", "-1"], "--drain-timeout must be seconds >= 0"),
        (["--api-key", " "], "the API key must not be empty"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["--max-num-seqs", "0"], "max_num_seqs must be >= 1"),
    ],
)
def test_options_that_are_refused(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["serve", str(tiny_llama), "--port", "0", *options]) == 1
    assert message in capsys.readouterr().err


def test_without_its_packages(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("steploop.serve.")]:
        if name != "steploop.serve.arguments":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve", str(tiny_llama)]) == 1
    assert "pip install 'steploop[serve]'" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    assert "/v1/chat/completions" in capsys.readouterr().out
