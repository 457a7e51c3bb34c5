"""The child's side of a measurement: loads an engine once, then runs one workload per line read from stdin."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from workload import Request, make_workload


class Engine(Protocol):
    """What a worker script measures."""

    def about(self) -> dict[str, Any]:
        """Versions and settings in force."""

    def run(self, requests: list[Request]) -> RunTimes:
        """Serves all requests, offered at once; greedy, exactly as many tokens as asked for."""


class RunTimes:
    """What happened to each request of a run. Times are seconds since it was offered."""

    def __init__(self) -> None:
        self.duration = 0.0
        self.first_token_times: list[float] = []
        self.last_token_times: list[float] = []
        self.token_ids: list[list[int]] = []
        self.inter_token_latencies: list[float] = []
        """Between any two tokens of a request that follow each other; empty where the engine does not tell."""
        self.figures: dict[str, float] = {}
        """More, of this engine alone."""

    def as_json(self, requests: list[Request]) -> dict[str, Any]:
        """The run's result, checked."""
        lengths = [len(ids) for ids in self.token_ids]
        wanted = [request.num_output_tokens for request in requests]
        if lengths != wanted:
            raise RuntimeError(f"the engine generated {lengths} tokens, not {wanted}")
        spans = zip(self.first_token_times, self.last_token_times, lengths, strict=True)
        return {
            "duration": self.duration,
            "num_requests": len(requests),
            "num_output_tokens": sum(lengths),
            "throughput": sum(lengths) / self.duration,
            **quantiles("ttft", self.first_token_times),
            **quantiles("tpot", [(last - first) / (n - 1) for first, last, n in spans if n > 1]),
            **quantiles("inter_token_latency", self.inter_token_latencies),
            **self.figures,
            "first_token_ids": [ids[0] for ids in self.token_ids],
        }


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Runs the worker script of an engine: serves one workload per line, given as the arguments of `make_workload`."""

    def answer(engine: Engine, workload: dict[str, Any]) -> dict[str, Any]:
        requests = make_workload(**workload)
        return engine.run(requests).as_json(requests)

    serve_lines(load, answer)


def serve_lines(load: Callable[[dict[str, Any]], Any], answer: Callable[[Any, dict[str, Any]], dict[str, Any]]) -> None:
    """Runs a worker script: settings as JSON in its first argument, one line of JSON out per line of JSON in."""
    # Only answers go to the parent; whatever the engine prints joins the errors.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    started = time.monotonic()
    engine = load(json.loads(sys.argv[1]))
    print(json.dumps(engine.about() | {"load_seconds": time.monotonic() - started}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=answers)


def quantiles(name: str, values: list[float]) -> dict[str, float]:
    """The 50th and 99th percentile: the smallest value that so many do not exceed."""
    ordered = sorted(values)
    return {f"{name}_p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in (50, 99) if ordered}
