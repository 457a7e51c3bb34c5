"""A run's figures and warnings, from hand-made records."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from steploop.loadtest.figures import describe, in_flight, request_rows, summarize_run
from steploop.loadtest.open_loop import RunResult
from steploop.loadtest.record import Arrival, RequestRecord
from steploop.loadtest.target import TargetFigures


def make_record(index: int, **fields: Any) -> RequestRecord:
    """Due at `index` seconds; one token at +1 s and one at +1.5 s; ends at +2 s."""
    due = 100.0 + index
    defaults: dict[str, Any] = {
        "started_time": due,
        "sent_time": due,
        "end_time": due + 2,
        "arrivals": [Arrival(due + 1, 1), Arrival(due + 1.5, 1)],
        "num_prompt_tokens": 10,
        "num_output_tokens": 2,
    }
    return RequestRecord(index, due, 10, 2, **{**defaults, **fields})


def make_result(records: list[RequestRecord], **fields: Any) -> RunResult:
    defaults: dict[str, Any] = {"interrupted": False, "lags": [0.001], "cpu_share": 0.1, "target": TargetFigures()}
    ends = [record.end_time for record in records if record.end_time is not None]
    return RunResult(records, 100.0, max(ends), **{**defaults, **fields})


def summarize(records: list[RequestRecord], slo: dict[str, float] | None = None, **fields: Any) -> dict[str, Any]:
    return summarize_run(make_result(records, **fields), slo, 0)


def test_percentiles_are_numpys() -> None:
    generator = random.Random(5)
    records = []
    for index in range(50):
        time, arrivals = 100.0 + index, []
        for _ in range(generator.randint(1, 40)):
            time += generator.expovariate(20)
            arrivals.append(Arrival(time, 1))
        records.append(make_record(index, arrivals=arrivals, end_time=time + 0.1, num_output_tokens=len(arrivals)))
    latencies = summarize(records)["latencies"]
    times = [[arrival.time for arrival in record.arrivals] for record in records]
    expected = {
        "ttft": [of_one[0] - record.due_time for of_one, record in zip(times, records, strict=True)],
        "itl": np.concatenate([np.diff(of_one) for of_one in times]),
        "chunk_gap": np.concatenate([np.diff(of_one) for of_one in times]),
        "tpot": [(of_one[-1] - of_one[0]) / (len(of_one) - 1) for of_one in times if len(of_one) > 1],
        "e2e": [record.e2e for record in records],
    }
    for name, values in expected.items():
        figures = latencies[name]
        assert figures["count"] == len(values)
        assert figures["mean"] == pytest.approx(np.mean(values))
        for quantile, share in (("p50", 50), ("p90", 90), ("p99", 99), ("max", 100)):
            assert figures[quantile] == pytest.approx(np.percentile(values, share))
    num_single = sum(len(of_one) == 1 for of_one in times)
    assert (latencies["ttft"]["num_missing"], latencies["itl"]["num_missing"]) == (0, num_single)


def test_tokens_of_a_chunk_share_its_wait() -> None:
    """Four tokens in two chunks: the gap of half a second is two latencies of a quarter."""
    latencies = summarize([make_record(0, num_output_tokens=4)])["latencies"]
    assert (latencies["itl"]["count"], latencies["itl"]["mean"]) == (2, 0.25)
    assert (latencies["chunk_gap"]["count"], latencies["chunk_gap"]["mean"]) == (1, 0.5)
    assert latencies["tpot"]["mean"] == 0.25


def test_throughput_and_goodput() -> None:
    records = [
        make_record(0),
        make_record(1, end_time=109.0),  # too late
        make_record(2, error="http_500", end_time=103.0, num_prompt_tokens=None, num_output_tokens=None),
        make_record(8),
    ]
    figures = summarize(records, {"e2e": 3.0})
    assert figures["duration"] == 10
    assert figures["throughput"] == {
        "requests_per_second": 0.3,
        "input_tokens_per_second": 3.0,
        "output_tokens_per_second": 0.6,
        "total_tokens_per_second": 3.6,
    }
    assert figures["goodput"] == {
        "slo": {"e2e": 3.0},
        "num_good": 2,
        "share_of_asked": 0.5,
        "requests_per_second": 0.2,
    }
    assert summarize(records)["goodput"] is None


def test_failures_are_counted_where_they_are_missing() -> None:
    failed = [make_record(index, error="timeout", error_detail="slow") for index in (1, 2)]
    figures = summarize([make_record(0), *failed, make_record(3, error="http_429", error_detail="many")])
    assert figures["errors"] == {
        "timeout": {"count": 2, "example": "slow"},
        "http_429": {"count": 1, "example": "many"},
    }
    for latency in figures["latencies"].values():
        assert latency["num_missing"] == 3
    assert figures["queue_time"]["num_missing"] == 4
    assert figures["warnings"] == ["3 of 4 requests failed; latencies are of the 1 completed ones"]


def test_nothing_completed() -> None:
    figures = summarize([make_record(0, error="timeout", arrivals=[])])
    assert figures["latencies"]["ttft"] == {
        "mean": None,
        "p50": None,
        "p90": None,
        "p99": None,
        "max": None,
        "count": 0,
        "num_missing": 1,
    }
    assert figures["throughput"]["output_tokens_per_second"] == 0
    assert figures["lengths"]["output_got"] == {"count": 0}


def test_lengths() -> None:
    records = [
        make_record(0, num_output_tokens=1),
        make_record(1, num_output_tokens=3),
        make_record(2, num_output_tokens=None),
        make_record(3, arrivals=[]),
        make_record(4),
    ]
    figures = summarize(records)
    lengths = figures["lengths"]
    assert (lengths["num_truncated"], lengths["num_longer"], lengths["num_without_usage"]) == (1, 1, 1)
    assert (lengths["output_asked"]["total"], lengths["output_got"]["total"]) == (10, 10)
    warnings = "\n".join(figures["warnings"])
    for words in (
        "1 answers have fewer tokens than asked",
        "1 answers have more tokens than asked",
        "1 answers came without usage",
        "1 completed answers had no text",
    ):
        assert words in warnings


def test_warnings_about_the_client() -> None:
    def warnings(late: float = 0.0, **fields: Any) -> str:
        return "\n".join(summarize([make_record(0, started_time=100.0 + late)], **fields)["warnings"])

    assert warnings() == ""
    assert warnings(0.05) == ""  # a twentieth of the second that the first token takes
    assert "requests were sent up to 300 ms late (p99), beside a time to first token of 1e+03 ms" in warnings(0.3)
    assert "event loop lagged by 400 ms (p99), beside 500 ms between chunks" in warnings(lags=[0.4])
    assert "the client took 95% of a core" in warnings(cpu_share=0.95)


def test_warnings_about_the_server() -> None:
    cached = summarize([make_record(0, num_cached_tokens=8), make_record(1, num_cached_tokens=0)])
    assert cached["prefix_cache"] == {"num_cached_tokens": 8, "share_of_prompt_tokens": 0.4}
    assert "40% of the prompts' tokens were in the prefix cache" in cached["warnings"][0]
    warnings = summarize_run(make_result([make_record(0, num_cached_tokens=8), make_record(1)]), None, 0, 0.25)[
        "warnings"
    ]
    assert (
        "80% of the prompts' tokens were in the prefix cache, where the workload itself repeats 25%, as" in warnings[0]
    )
    assert not summarize_run(make_result([make_record(0, num_cached_tokens=8)]), None, 0, 0.75)["warnings"]
    served = TargetFigures(mean_queue_time=0.25, num_queue_times=5, queue_time_source="its metrics")
    figures = summarize([make_record(0), make_record(1)], target=served)
    assert figures["queue_time"]["mean"] == 0.25
    assert (figures["queue_time"]["p50"], figures["queue_time"]["count"]) == (None, 5)
    assert figures["queue_time"]["source"] == "its metrics"
    assert figures["warnings"] == ["the server counted 5 requests during the run: it served others, too"]


def test_queue_times_of_the_engine() -> None:
    records = [make_record(0, queue_time=0.25), make_record(1, queue_time=0.75)]
    queue_time = summarize(records, target=TargetFigures(queue_time_source="here"))["queue_time"]
    assert (queue_time["mean"], queue_time["max"], queue_time["num_missing"]) == (0.5, 0.75, 0)


def test_in_flight() -> None:
    records = [make_record(0), make_record(1), make_record(2, end_time=None), make_record(7, sent_time=None)]
    assert in_flight(records, 110.0) == [(100.0, 1), (101.0, 2), (102.0, 2), (103.0, 1), (110.0, 0)]
    figures = summarize_run(RunResult(records, 100.0, 110.0, True, [], 0.0, TargetFigures()), None, 0)
    assert figures["in_flight"] == {"mean": pytest.approx(1.2), "max": 2}


def test_steps() -> None:
    iterations = [{"num_scheduled_requests": number, "num_preemptions": 1} for number in (2, 4)]
    figures = summarize([make_record(0)], target=TargetFigures(iterations=iterations, num_iterations_lost=3))
    assert figures["steps"] == {
        "count": 2,
        "num_lost": 3,
        "mean_scheduled": 3.0,
        "max_scheduled": 4,
        "num_preemptions": 2,
    }
    assert "3 of the engine's steps are missing" in figures["warnings"][0]
    assert summarize([make_record(0)])["steps"] is None


def test_rows() -> None:
    rows = request_rows(make_result([make_record(0), make_record(1, error="timeout", error_detail="slow")]))
    assert [row["state"] for row in rows] == ["completed", "failed"]
    assert (rows[0]["due"], rows[0]["ttft"], rows[0]["end"], rows[0]["e2e"]) == (0, 1, 2, 2)
    assert (rows[1]["error"], rows[1]["e2e"]) == ("timeout", None)


def test_describe_nothing() -> None:
    assert describe([])["p99"] is None
