"""Measures llama.cpp's server over loopback HTTP; started by compare.py. Needs nothing of steploop."""

from __future__ import annotations

import ctypes
import http.client
import json
import platform
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

from catalog import LLAMA_CPP
from worker import RunTimes, serve
from workload import NUM_REQUESTS, Request

SERVER = Path(sys.prefix) / "build" / "bin" / "llama-server"
HOST = "127.0.0.1"
UNKNOWN = -1  # a token whose id the server keeps to itself


class LlamaServer:
    """A connection and a thread for each request; what they receive is read once all is over."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._port = free_port()
        self._options = server_options(settings)
        address = ["--host", HOST, "--port", str(self._port)]
        command = [SERVER, "--model", settings["model"], *address, *self._options]
        self._server = subprocess.Popen(command, preexec_fn=_end_with_parent)
        while not self._is_ready():
            time.sleep(0.1)

    def about(self) -> dict[str, Any]:
        """Versions and settings in force."""
        package, _, number = LLAMA_CPP.partition("==")
        return {
            "versions": {package: number, "python": platform.python_version()},
            "num_threads": self._settings["num_threads"],
            "dtype": Path(self._settings["model"]).name,
            "options": " ".join(self._options),
        }

    def run(self, requests: list[Request]) -> RunTimes:
        """Serves all requests, offered at once."""
        events: list[list[tuple[float, bytes]]] = [[] for _ in requests]
        threads = [
            Thread(target=self._request, args=(request, received))
            for request, received in zip(requests, events, strict=True)
        ]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        run = RunTimes()
        run.duration = time.monotonic() - started
        for received in events:
            _add(run, [(moment - started, json.loads(line)) for moment, line in received])
        return run

    def _request(self, request: Request, received: list[tuple[float, bytes]]) -> None:
        connection = http.client.HTTPConnection(HOST, self._port)
        body = {
            "prompt": request.prompt_token_ids,
            "n_predict": request.num_output_tokens,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
        }
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        prefix = b"data: "
        for line in response:
            if line.startswith(prefix):
                received.append((time.monotonic(), line[len(prefix) :]))
            elif line.strip():
                received.append((time.monotonic(), json.dumps({"error": line.decode()}).encode()))
        connection.close()

    def _is_ready(self) -> bool:
        if self._server.poll() is not None:
            raise RuntimeError(f"llama-server ended with {self._server.returncode}")
        connection = http.client.HTTPConnection(HOST, self._port)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except OSError:  # it does not listen yet
            return False
        finally:
            connection.close()


def server_options(settings: dict[str, Any]) -> list[str]:
    """Of llama-server, for the batch that `settings` describe."""
    slots, threads = str(settings["max_num_seqs"]), str(settings["num_threads"])
    sizes = {
        "--parallel": slots,
        "--ctx-size": str(settings["max_num_seqs"] * settings["max_model_len"]),
        "--batch-size": str(settings["max_num_batched_tokens"]),
        "--ubatch-size": "512",
        "--threads": threads,
        "--threads-batch": threads,
        "--threads-http": str(NUM_REQUESTS + 2),  # one for each that streams, and for others
    }
    # Nothing that is computed once is found again.
    return ["--no-ui", "--flash-attn", "on", "--cache-ram", "0", *(part for item in sizes.items() for part in item)]


def _add(run: RunTimes, events: list[tuple[float, dict[str, Any]]]) -> None:
    """What was received for a request. Bytes that end within a character are held back, so some tokens come late and
    without their ids; but every event tells how many there are."""
    tokens: list[int] = []
    times: list[float] = []
    for moment, event in events:
        if "tokens_predicted" not in event:
            raise RuntimeError(f"llama-server answered {event}")
        num_new = event["tokens_predicted"] - len(tokens)
        if num_new > 0:
            tokens += [UNKNOWN] * (num_new - 1) + (event["tokens"] or [UNKNOWN])
            times.append(moment)
    if not times:
        raise RuntimeError("llama-server closed a connection without an answer")
    run.first_token_times.append(times[0])
    run.last_token_times.append(times[-1])
    run.token_ids.append(tokens)


def _end_with_parent() -> None:
    """Else a server whose worker is killed would go on, and wait by spinning."""
    set_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def free_port() -> int:
    """Nobody has it now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    serve(LlamaServer)
