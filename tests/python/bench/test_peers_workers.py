"""Workers of bench/peers that can run here: transformers', and llama.cpp's in front of a stand-in for its server."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

SERVER = '''#!{python}
"""Streams the tokens 100, 101, ... as llama-server does; the text of each second one ends within a character."""
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        num_tokens = asked["n_predict"]
        if asked["prompt"][0] % 2 and {broken}:
            self.event({{"error": "no room"}})
        for n in range(1, num_tokens + 1, 2):
            self.event({{"tokens": [99 + n], "tokens_predicted": n}})
        self.event({{"tokens": [], "tokens_predicted": num_tokens, "stop": True}})
        self.wfile.write(b"0\\r\\n\\r\\n")
    def event(self, value):
        data = b"data: " + json.dumps(value).encode() + b"\\n\\n"
        self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(data), data))
        self.wfile.flush()

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''


@pytest.fixture
def workloads() -> list[dict[str, Any]]:
    return [{"name": "mixed", "num_requests": 5, "max_output": 6}, {"name": "single", "max_output": 3}]


@pytest.mark.parametrize("name", ["transformers_static", "transformers_continuous"])
def test_transformers(bench_peers: Path, tiny_llama: Path, name: str, workloads: list[dict[str, Any]]) -> None:
    import torch
    from engines import EngineProcess
    from transformers import AutoModelForCausalLM
    from workload import make_workload

    settings = {"model": str(tiny_llama), "dtype": "float32", "num_threads": 1, "max_num_seqs": 2, "max_model_len": 512}
    script = bench_peers / f"{name}_worker.py"
    environment = {"PYTHONPATH": str(bench_peers.parent / "engine")}
    worker = EngineProcess(name, sys.executable, settings, environment, script=script, timeout=120)
    try:
        assert worker.about["dtype"] == "float32" and worker.about["num_threads"] == 1
        runs = [worker.run(workload | {"vocab_size": 300}) for workload in workloads + workloads]
    finally:
        worker.close()
    model = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    for run, workload in zip(runs, workloads + workloads, strict=True):
        requests = make_workload(**workload | {"vocab_size": 300})
        with torch.no_grad():
            first = [int(model(torch.tensor([each.prompt_token_ids])).logits[0, -1].argmax()) for each in requests]
        assert run["first_token_ids"] == first
        assert run["num_output_tokens"] == sum(request.num_output_tokens for request in requests)
        assert 0 < run["ttft_p50"] <= run["ttft_p99"] <= run["duration"] and run["tpot_p50"] > 0


@pytest.fixture
def llama_worker(bench_peers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import llama_server_worker

    server = tmp_path / "llama-server"
    monkeypatch.setattr(llama_server_worker, "SERVER", server)
    loaded = []

    def load(text: str) -> Any:
        server.write_text(text)
        server.chmod(server.stat().st_mode | stat.S_IXUSR)
        settings = {"max_num_seqs": 2, "max_model_len": 512, "max_num_batched_tokens": 2048, "num_threads": 1}
        worker = llama_server_worker.LlamaServer(settings | {"model": str(tmp_path / "q4_0.gguf")})
        loaded.append(worker)
        return worker

    yield load
    for worker in loaded:
        worker._server.kill()
        worker._server.wait()


def test_llama_server(llama_worker: Any, workloads: list[dict[str, Any]], tmp_path: Path) -> None:
    from workload import make_workload

    worker = llama_worker(SERVER.format(python=sys.executable, broken=False))
    assert worker.about()["dtype"] == "q4_0.gguf" and str(tmp_path) not in json.dumps(worker.about())
    requests = make_workload(**workloads[0])
    run = worker.run(requests)
    result = run.as_json(requests)  # the lengths are right, although tokens were held back
    assert result["first_token_ids"] == [100] * 5
    for tokens, request in zip(run.token_ids, requests, strict=True):
        assert tokens == [100 + n if n % 2 == 0 else -1 for n in range(request.num_output_tokens)]
    assert 0 < result["ttft_p50"] <= result["ttft_p99"] <= result["duration"]


def test_llama_server_refuses(llama_worker: Any, workloads: list[dict[str, Any]]) -> None:
    from workload import make_workload

    worker = llama_worker(SERVER.format(python=sys.executable, broken=True))
    with pytest.raises(RuntimeError, match="llama-server answered {'error': 'no room'}"):
        worker.run(make_workload(**workloads[0]))
    with pytest.raises(RuntimeError, match="llama-server ended with 7"):
        llama_worker(f"#!{sys.executable}\nraise SystemExit(7)\n")
