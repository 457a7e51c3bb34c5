"""Queue times out of a server's metrics."""

from __future__ import annotations

import pytest

from steploop.loadtest.queue_time import QueueTimes, parse_queue_times

VLLM = """# HELP vllm:request_queue_time_seconds Histogram of time spent in WAITING phase for request.
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="a}b"} 3.0
vllm:request_queue_time_seconds_count{engine="0",model_name="a}b"} 3.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="a}b"} 0.25
vllm:request_queue_time_seconds_count{engine="1",model_name="a}b"} 1.0
vllm:request_queue_time_seconds_sum{engine="1",model_name="a}b"} 5e-01
vllm:request_queue_time_seconds_created{engine="0",model_name="a}b"} 1.7e+09
"""


def test_all_labels_are_added_up() -> None:
    assert parse_queue_times(VLLM) == QueueTimes("vllm:request_queue_time_seconds", 0.75, 4)


def test_without_labels() -> None:
    text = "steploop:request_queue_time_seconds_sum 2\nsteploop:request_queue_time_seconds_count 8\n"
    assert parse_queue_times(text) == QueueTimes("steploop:request_queue_time_seconds", 2, 8)


@pytest.mark.parametrize(
    "text",
    ["", "other_sum 3\n", "steploop:request_queue_time_seconds_sum many\n", "# vllm:request_queue_time_seconds_sum"],
)
def test_none(text: str) -> None:
    assert parse_queue_times(text) is None
