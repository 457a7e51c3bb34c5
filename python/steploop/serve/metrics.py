"""Prometheus metrics, under vLLM's names with the prefix `steploop:`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from steploop.engine import LLMEngine
from steploop.outputs import RequestOutput

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_LONG_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_COUNTERS = (
    ("num_preemptions", "num_preemptions", "Times that a sequence lost its KV blocks."),
    ("prefix_cache_queries", "num_prefix_queried_tokens", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "num_prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
    ("recomputed_tokens", "num_recomputed_tokens", "Tokens computed once more after a preemption."),
)
_GAUGES = (
    ("num_requests_waiting", "num_waiting", "Sequences that have not started."),
    ("num_requests_running", "num_running", "Sequences that have started and hold KV blocks (active)."),
    ("num_requests_preempted", "num_preempted", "Sequences that gave way and wait to go on."),
)


class ServerMetrics:
    """Counts what an engine does.

    Args:
        model_name: The value of every metric's label `model_name`.
    """

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._last_token_times: dict[str, float] = {}
        self._num_tokens: dict[str, int] = {}
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self._generation_tokens = self._counter("generation_tokens", "New tokens.")
        self._finished = Counter(
            "steploop:request_success",
            "Requests that have ended, by why their first sample did.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        seconds = self._histogram
        self._first_token = seconds("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._inter_token = seconds("inter_token_latency_seconds", "Between two tokens of a request.", _SECONDS)
        self._per_token = seconds(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens.", _SECONDS
        )
        self._end_to_end = seconds("e2e_request_latency_seconds", "From arrival to the last token.", _LONG_SECONDS)
        self._queue = seconds("request_queue_time_seconds", "From arrival to the first step.", _LONG_SECONDS)
        self._prefill = seconds(
            "request_prefill_time_seconds", "From the first step to the first token.", _LONG_SECONDS
        )
        self._decode = seconds("request_decode_time_seconds", "From the first token to the last.", _LONG_SECONDS)
        self._prompt_length = seconds("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._output_length = seconds("request_generation_tokens", "New tokens of a request.", _TOKENS)

    def watch(self, engine: LLMEngine) -> None:
        """Adds what `engine` counts itself. Call it once."""
        self._registry.register(_EngineCollector(engine, self._model_name))

    def on_step(self, outputs: list[RequestOutput]) -> None:
        """Takes in what a step brought. One thread at a time."""
        for output in outputs:
            self._take(output)

    def render(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        return generate_latest(self._registry)

    def _take(self, output: RequestOutput) -> None:
        metrics, request_id = output.metrics, output.request_id
        num_tokens, last = metrics.num_generation_tokens, metrics.last_token_time
        before = self._num_tokens.get(request_id, 0)
        if num_tokens > before and last is not None:
            self._generation_tokens.inc(num_tokens - before)
            if before == 0:
                self._prompt_tokens.inc(len(output.prompt_token_ids))
                _observe(self._first_token, metrics.time_to_first_token)
            else:
                for _ in range(num_tokens - before):  # the samples of a request get theirs in the same steps
                    self._inter_token.observe(last - self._last_token_times[request_id])
            self._num_tokens[request_id] = num_tokens
            self._last_token_times[request_id] = last
        if output.finished:
            self._num_tokens.pop(request_id, None)
            self._last_token_times.pop(request_id, None)
            self._finish(output)

    def _finish(self, output: RequestOutput) -> None:
        metrics = output.metrics
        self._finished.labels(self._model_name, output.outputs[0].finish_reason).inc()
        self._prompt_length.observe(len(output.prompt_token_ids))
        self._output_length.observe(metrics.num_generation_tokens)
        _observe(self._queue, metrics.time_in_queue)
        _observe(self._per_token, metrics.time_per_output_token)
        first, last = metrics.first_token_time, metrics.last_token_time
        if first is not None and last is not None:
            _observe(self._end_to_end, last - metrics.arrival_time)
            _observe(self._decode, last - first)
            if metrics.first_scheduled_time is not None:
                _observe(self._prefill, first - metrics.first_scheduled_time)

    def _counter(self, name: str, text: str) -> Any:
        return Counter(f"steploop:{name}", text, ("model_name",), registry=self._registry).labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        return Histogram(f"steploop:{name}", text, ("model_name",), buckets=buckets, registry=self._registry).labels(
            self._model_name
        )


class _EngineCollector:
    """What the engine counts, asked for when it is scraped."""

    def __init__(self, engine: LLMEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, key, text in _COUNTERS:
            counter = CounterMetricFamily(f"steploop:{name}", text, labels=("model_name",))
            counter.add_metric((self._model_name,), stats[key])
            yield counter
        gauges = [(name, stats[key], text) for name, key, text in _GAUGES]
        gauges += [
            ("num_requests_scheduled", stats["last_step"]["num_sequences"], "Sequences in the last step."),
            (
                "kv_cache_usage_perc",
                stats["num_used_kv_blocks"] / stats["num_kv_blocks"],
                "Share of the KV blocks in use; 1: all.",
            ),
        ]
        for name, value, text in gauges:
            gauge = GaugeMetricFamily(f"steploop:{name}", text, labels=("model_name",))
            gauge.add_metric((self._model_name,), value)
            yield gauge


def _observe(histogram: Any, value: float | None) -> None:
    if value is not None:
        histogram.observe(value)
