"""/metrics and /status count what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families


def test_requests_are_counted(tiny_llama: Path, serve: Any) -> None:
    with serve(tiny_llama, "--num-threads", "1") as server:
        for stream in (False, True):
            body = {"prompt": "hello there", "max_tokens": 10, "ignore_eos": True, "n": 2, "stream": stream}
            assert server.client.post("/v1/completions", json=body).status_code == 200
        assert server.metric("request_success_total") == 2
        assert server.metric("generation_tokens_total") == 40
        assert server.metric("prompt_tokens_total") == 24
        assert server.metric("time_to_first_token_seconds_count") == 2
        assert server.metric("inter_token_latency_seconds_count") in range(36, 39)
        assert 0 < server.metric("inter_token_latency_seconds_sum") < 60
        for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
            assert server.metric(f"{name}_seconds_count") == 2
            assert server.metric(f"{name}_seconds_sum") >= 0
        assert server.metric("request_generation_tokens_sum") == 40
        assert server.metric("prefix_cache_queries_total") > 0
        assert server.metric("num_preemptions_total") == 0
        for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
            assert server.metric(name) == 0
        server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 400, "deadline_ms": 0.001})
        assert 'finished_reason="timeout"' in server.client.get("/metrics").text

        status = server.client.get("/status").json()
        assert status["now"]["finished"] == 5  # samples
        history = status["history"]
        assert sum(history["generation_tokens"]) + 4 >= 40  # a prompt's last chunk brings a token, too
        assert len({len(values) for values in history.values()}) == 1
        assert all(second <= 0 for second in history["seconds"])


def test_the_format_is_prometheus(tiny_server: Any) -> None:
    text = tiny_server.client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["steploop:time_to_first_token_seconds"].type == "histogram"
    assert families["steploop:generation_tokens"].type == "counter"
    assert families["steploop:num_requests_running"].type == "gauge"
    for family in families.values():
        assert family.documentation
        assert all(sample.labels.get("model_name") == "tiny" for sample in family.samples)


@pytest.mark.parametrize("name", ["num_requests_running", "num_requests_waiting", "num_requests_scheduled"])
def test_waiting_scheduled_and_running_are_told_apart(tiny_server: Any, name: str) -> None:
    assert tiny_server.metric(name) >= 0
