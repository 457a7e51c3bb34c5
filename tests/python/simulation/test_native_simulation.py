"""The native simulator: what it makes of requests, step by step and in the long run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steploop import _C
from steploop.errors import InvalidArgumentError, InvalidRequestError, RequestTooLongError

FIELDS = {
    "weight_bytes": 0.0,
    "weight_flops_per_token": 0.0,
    "output_bytes": 0.0,
    "output_flops_per_row": 0.0,
    "kv_bytes_per_token": 0.0,
    "attention_flops_per_pair": 0.0,
    "block_bytes": 0.0,
    "bytes_per_second": 1e6,
    "flops_per_second": 1e6,
    "host_bytes_per_second": 1e6,
    "weight_bandwidth_efficiency": 1.0,
    "compute_efficiency": 1.0,
    "kv_bandwidth_efficiency": 1.0,
    "attention_compute_efficiency": 1.0,
    "overlap": 1.0,
    "step_us": 0.0,
    "sequence_us": 0.0,
    "sample_row_us": 0.0,
    "token_us": 0.0,
}
SCHEDULER = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 256,
    "num_kv_blocks": 64,
    "block_size": 8,
}


def cost(**fields: float) -> Any:
    return _C.CostModel(FIELDS | fields)


def run(requests: list[tuple[int, int, int]], *, settings: Any = None, fields: Any = None, **options: Any) -> Any:
    """Of (arrival in us, prompt tokens, output tokens); each asks for what it gets unless `max_tokens` is given."""
    arrivals, prompts, outputs = (np.array(column) for column in zip(*requests, strict=True))
    options.setdefault("max_tokens", outputs.astype(np.int32))
    return _C.simulate(
        _C.SchedulerConfig(**(SCHEDULER | (settings or {}))),
        cost(**(fields or {"step_us": 100.0})),
        arrival_us=arrivals.astype(np.int64),
        num_prompt_tokens=prompts.astype(np.int32),
        num_output_tokens=outputs.astype(np.int32),
        **options,
    )


def draw(count: int, seed: int, *, longest_prompt: int = 80, longest_output: int = 60) -> list[tuple[int, int, int]]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.integers(0, 4000, count))
    prompts, outputs = rng.integers(1, longest_prompt, count), rng.integers(1, longest_output, count)
    return list(zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True))


# ---- The cost model ----


@pytest.mark.parametrize(
    ("fields", "work", "duration_us"),
    [
        ({"step_us": 7, "sequence_us": 2, "sample_row_us": 3, "token_us": 0.5}, (10, 4, 2, 0, 0, 0), 7 + 8 + 6 + 5),
        # Reading takes 4 s, computing 10 times 1 s: the longer counts, or the sum, or something between.
        ({"weight_bytes": 4e6, "weight_flops_per_token": 1e6}, (10, 1, 0, 0, 0, 0), 10e6),
        ({"weight_bytes": 4e6, "weight_flops_per_token": 1e6}, (3, 1, 0, 0, 0, 0), 4e6),
        ({"weight_bytes": 4e6, "weight_flops_per_token": 1e6, "overlap": 0}, (10, 1, 0, 0, 0, 0), 14e6),
        ({"weight_bytes": 4e6, "weight_flops_per_token": 1e6, "overlap": 0.25}, (10, 1, 0, 0, 0, 0), 13e6),
        ({"weight_bytes": 4e6, "weight_bandwidth_efficiency": 0.5}, (1, 1, 0, 0, 0, 0), 8e6),
        ({"weight_flops_per_token": 1e6, "compute_efficiency": 0.25}, (2, 1, 0, 0, 0, 0), 8e6),
        # The output layer is read only where something is sampled.
        ({"output_bytes": 2e6, "output_flops_per_row": 1e6}, (9, 3, 0, 0, 0, 0), 0),
        ({"output_bytes": 2e6, "output_flops_per_row": 1e6}, (9, 3, 1, 0, 0, 0), 2e6),
        ({"output_bytes": 2e6, "output_flops_per_row": 1e6}, (9, 3, 3, 0, 0, 0), 3e6),
        ({"kv_bytes_per_token": 100, "kv_bandwidth_efficiency": 0.5}, (1, 1, 1, 50, 0, 0), 10_000),
        ({"attention_flops_per_pair": 100, "attention_compute_efficiency": 0.1}, (8, 1, 1, 0, 36, 0), 36_000),
        ({"block_bytes": 1000, "host_bytes_per_second": 5e5}, (1, 1, 1, 0, 0, 3), 6000),
        ({"block_bytes": 1000, "host_bytes_per_second": 0}, (1, 1, 1, 0, 0, 3), 0),
    ],
)
def test_duration_of_a_step(fields: dict[str, float], work: tuple[int, ...], duration_us: float) -> None:
    names = ("num_tokens", "num_sequences", "num_sample_rows", "num_decode_keys", "num_prompt_pairs")
    names += ("num_transfer_blocks",)
    amounts = dict(zip(names, work, strict=True))
    assert cost(**fields).duration_us(**amounts) == pytest.approx(duration_us, rel=1e-12)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", FIELDS)
def test_cost_fields_out_of_range(name: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        cost(**{name: value})


def test_cost_fields_are_all_asked_for_and_no_others() -> None:
    with pytest.raises(InvalidArgumentError, match="needs step_us"):
        _C.CostModel({name: value for name, value in FIELDS.items() if name != "step_us"})
    with pytest.raises(InvalidArgumentError, match="not known"):
        cost(speed=1.0)


# ---- One step after another ----


def test_times_of_requests() -> None:
    # Every step takes 100 us. The first two start at 0: 40 prompt tokens, at most 32 a step.
    raw = run([(0, 20, 3), (0, 20, 1), (250, 5, 2)])
    requests = raw["requests"]
    assert requests["scheduled_us"].tolist() == [0, 0, 300]
    assert requests["first_token_us"].tolist() == [100, 200, 400]
    assert requests["last_token_us"].tolist() == [300, 200, 500]
    assert requests["longest_gap_us"].tolist() == [100, -1, 100]
    assert requests["num_output_tokens"].tolist() == [3, 1, 2]
    assert raw["ended_us"] == 500
    assert raw["inter_token"]["count"] == 3
    assert raw["inter_token"]["mean_us"] == 100
    assert raw["inter_token"]["quantiles_us"] == pytest.approx([100, 100, 100], rel=0.0014)


def test_durations_follow_what_a_step_does() -> None:
    fields = {"token_us": 10.0, "kv_bytes_per_token": 5.0, "attention_flops_per_pair": 1.0}
    raw = run([(0, 40, 2)], fields=fields, record_schedule=True)
    schedule = raw["schedule"]
    # 32 tokens over nothing, 8 over 32, one over 40.
    pairs = [32 * 33 // 2, 8 * 32 + 8 * 9 // 2]
    assert schedule["token_counts"].tolist() == schedule["num_tokens"].tolist() == [32, 8, 1]
    assert schedule["num_sample_rows"].tolist() == [0, 1, 1]
    assert schedule["num_prompt_pairs"].tolist() == [*pairs, 0]
    assert schedule["num_decode_keys"].tolist() == [0, 0, 41]
    assert schedule["duration_us"].tolist() == [320 + pairs[0], 80 + pairs[1], 10 + 5 * 41]
    assert schedule["began_us"].tolist() == [0, *np.cumsum(schedule["duration_us"])[:-1].tolist()]


def test_the_clock_waits_for_arrivals() -> None:
    raw = run([(1000, 4, 1), (5000, 4, 1)])
    assert raw["requests"]["first_token_us"].tolist() == [1100, 5100]
    assert raw["replicas"][0]["busy_us"] == 200


def test_max_tokens_is_what_reserve_keeps_blocks_for() -> None:
    requests = [(0, 8, 8)] * 8
    settings = {"scheduling_policy": "reserve", "max_num_seqs": 8, "max_num_batched_tokens": 256, "num_kv_blocks": 32}
    greedy = run(requests, settings=settings, max_tokens=np.full(8, 120, np.int32))
    modest = run(requests, settings=settings, max_tokens=np.full(8, 8, np.int32))
    assert greedy["timeline"]["num_steps"].sum() == 4 * modest["timeline"]["num_steps"].sum()  # two at a time


@pytest.mark.parametrize("policy", ["on_demand", "reserve", "estimate", "static"])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_everybody_is_served_to_the_end(policy: str, chunked: bool, caching: bool) -> None:
    requests = [(arrival // 4, prompt, output) for arrival, prompt, output in draw(200, 1)]
    settings = {
        "scheduling_policy": policy,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": caching,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 16,
        "num_kv_blocks": 40,
    }
    raw = run(requests, settings=settings, fields={"step_us": 100.0, "token_us": 2.0})
    columns = raw["requests"]
    assert columns["num_output_tokens"].tolist() == [output for _, _, output in requests]
    arrivals = np.array([arrival for arrival, _, _ in requests])
    assert (columns["scheduled_us"] >= arrivals).all()
    assert (columns["first_token_us"] > columns["scheduled_us"]).all()
    assert (columns["last_token_us"] >= columns["first_token_us"]).all()
    (stats,) = raw["replicas"]
    assert stats["num_finished"] == 200
    assert stats["num_used_kv_blocks"] == stats["num_running"] == stats["num_waiting"] == 0
    assert stats["num_preemptions"] == columns["num_preemptions"].sum()
    assert (stats["num_preemptions"] > 0) == (policy in ("on_demand", "estimate"))
    timeline = raw["timeline"]
    assert timeline["num_decode_tokens"].sum() == sum(output - 1 for _, _, output in requests)
    assert timeline["busy_us"].sum() == stats["busy_us"]
    assert raw["inter_token"]["count"] == sum(output - 1 for _, _, output in requests)


def test_the_same_again() -> None:
    def once() -> Any:
        return run(draw(300, 3), settings={"num_kv_blocks": 40}, num_replicas=3, record_schedule=True)

    one, other = once(), once()
    for part in ("requests", "timeline", "schedule"):
        for name, column in one[part].items():
            assert np.array_equal(column, other[part][name]), name


# ---- What prompts share ----


def test_segments_of_one_content_are_found_in_the_prefix_cache() -> None:
    columns = {
        "segment_offsets": np.array([0, 2, 4, 6], np.int64),
        "segment_contents": np.array([7, 1, 7, 2, 8, 3], np.int64),
        "segment_lengths": np.array([32, 8, 32, 8, 32, 8], np.int32),
    }
    raw = run([(0, 40, 4), (10_000, 40, 4), (20_000, 40, 4)], **columns)
    assert raw["requests"]["num_cached_tokens"].tolist() == [0, 32, 0]


def test_an_answer_goes_on_with_the_prompts_content() -> None:
    # The second turn has the first's prompt of 32 tokens and its answer of 24, of which the last was never computed.
    columns = {
        "segment_offsets": np.array([0, 1, 2], np.int64),
        "segment_contents": np.array([5, 5], np.int64),
        "segment_lengths": np.array([32, 80], np.int32),
    }
    raw = run([(0, 32, 24), (10_000, 80, 2)], **columns)
    assert raw["requests"]["num_cached_tokens"].tolist() == [0, 48]


def test_tenants_do_not_share_prefixes() -> None:
    columns = {
        "segment_offsets": np.arange(4, dtype=np.int64),
        "segment_contents": np.full(3, 9, np.int64),
        "segment_lengths": np.full(3, 40, np.int32),
        "tenants": np.array([0, 1, 0], np.int32),
    }
    raw = run([(0, 40, 1), (10_000, 40, 1), (20_000, 40, 1)], **columns)
    assert raw["requests"]["num_cached_tokens"].tolist() == [0, 0, 32]


# ---- Replicas ----


def test_round_robin_takes_turns() -> None:
    raw = run([(0, 8, 4)] * 7, num_replicas=3, routing="round_robin")
    assert raw["requests"]["replica"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert sum(replica["num_finished"] for replica in raw["replicas"]) == 7


def test_the_fewest_outstanding_tokens() -> None:
    raw = run([(0, 100, 50), (0, 10, 10), (0, 10, 10), (0, 80, 80), (0, 1, 1)], num_replicas=2)
    # 150 to the first; 20 and 40 and 200 to the second, and then the first has less.
    assert raw["requests"]["replica"].tolist() == [0, 1, 1, 1, 0]


def test_prefix_affine_goes_where_the_prompt_is_cached() -> None:
    columns = {
        "segment_offsets": np.arange(5, dtype=np.int64),
        "segment_contents": np.array([1, 2, 2, 1], np.int64),
        "segment_lengths": np.full(4, 64, np.int32),
    }
    requests = [(0, 64, 4), (0, 64, 4), (50_000, 64, 4), (100_000, 64, 4)]
    raw = run(requests, num_replicas=2, routing="prefix_affine", **columns)
    assert raw["requests"]["replica"].tolist() == [0, 1, 1, 0]
    assert raw["requests"]["num_cached_tokens"].tolist() == [0, 0, 56, 56]
    raw = run(requests, num_replicas=2, routing="least_outstanding", **columns)
    assert raw["requests"]["replica"].tolist() == [0, 1, 0, 0]


def test_replicas_step_at_the_same_time() -> None:
    alone = run([(0, 30, 50)] * 12)
    four = run([(0, 30, 50)] * 12, num_replicas=4)
    assert four["ended_us"] < alone["ended_us"] / 2


# ---- What is recorded ----


def test_spans_are_when_a_request_had_a_place() -> None:
    requests = draw(60, 5)
    raw = run(requests, settings={"num_kv_blocks": 33, "max_num_seqs": 8}, record_spans=True)
    spans, columns = raw["spans"], raw["requests"]
    assert columns["num_preemptions"].sum() > 0
    counts = np.bincount(spans["request"], minlength=60)
    assert (counts == columns["num_preemptions"] + 1).all()
    assert (spans["ended_us"] > spans["began_us"]).all()
    first: dict[int, int] = {}
    for request, began, ended in zip(spans["request"], spans["began_us"], spans["ended_us"], strict=True):
        first.setdefault(request, began)
        assert ended <= columns["last_token_us"][request]
    assert all(first[request] == columns["scheduled_us"][request] for request in range(60))


def test_the_timeline_keeps_its_sums_in_few_points() -> None:
    requests = draw(400, 6)
    fine = run(requests, max_timeline_points=100_000)["timeline"]
    coarse = run(requests, max_timeline_points=16)["timeline"]
    assert len(fine["began_us"]) == fine["num_steps"].sum() > 1000
    assert 8 <= len(coarse["began_us"]) <= 16
    for name in ("busy_us", "sequences_us", "used_blocks_us", "num_steps", "num_prompt_tokens", "num_decode_tokens"):
        assert coarse[name].sum() == pytest.approx(fine[name].sum(), rel=1e-12), name
    assert coarse["longest_step_us"].max() == fine["longest_step_us"].max()
    assert (np.diff(coarse["began_us"]) > 0).all()
    assert coarse["ended_us"][-1] == fine["ended_us"][-1]


def test_quantiles_of_gaps_are_near_the_exact_ones() -> None:
    requests = draw(300, 8)
    fields = {"step_us": 50.0, "token_us": 7.0, "kv_bytes_per_token": 1.0}
    raw = run(requests, fields=fields, record_schedule=True, quantiles=[0.1, 0.5, 0.9, 0.99])
    schedule = raw["schedule"]
    # Who had reached its end in a step got a token as the step ended.
    lengths = np.array([prompt for _, prompt, _ in requests])
    last, gaps = {}, []
    for step, (began, duration) in enumerate(zip(schedule["began_us"], schedule["duration_us"], strict=True)):
        for at in range(schedule["offsets"][step], schedule["offsets"][step + 1]):
            request = schedule["requests"][at]
            if schedule["first_tokens"][at] + schedule["token_counts"][at] < lengths[request]:
                continue
            lengths[request] += 1
            if request in last:
                gaps.append(began + duration - last[request])
            last[request] = began + duration
    assert raw["inter_token"]["count"] == len(gaps)
    assert raw["inter_token"]["mean_us"] == pytest.approx(np.mean(gaps), rel=1e-9)
    assert raw["inter_token"]["max_us"] == max(gaps)
    exact = np.quantile(gaps, [0.1, 0.5, 0.9, 0.99], method="higher")
    assert raw["inter_token"]["quantiles_us"] == pytest.approx(exact.tolist(), rel=0.003)


# ---- Bad input ----


@pytest.mark.parametrize(
    ("requests", "options", "error", "message"),
    [
        ([(5, 4, 1), (4, 4, 1)], {}, InvalidArgumentError, "request 1: arrivals must not go back, got 4 us after 5"),
        ([(-1, 4, 1)], {}, InvalidArgumentError, "request 0: arrivals"),
        ([(0, 4, 1), (0, 0, 1)], {}, InvalidArgumentError, "request 1: its prompt must have at least 1 token, got 0"),
        ([(0, 4, 0)], {}, InvalidArgumentError, "request 0: its output must have 1 to max_tokens"),
        (
            [(0, 4, 3)],
            {"max_tokens": np.array([2], np.int32)},
            InvalidArgumentError,
            "1 to max_tokens .2. tokens, got 3",
        ),
        ([(0, 256, 1)], {}, RequestTooLongError, "request 0: the prompt has 256 tokens"),
        ([(0, 4, 1)], {"num_replicas": 0}, InvalidArgumentError, "num_replicas must be in 1..1024, got 0"),
        ([(0, 4, 1)], {"routing": "random"}, InvalidArgumentError, "round_robin, least_outstanding, prefix_affine"),
        ([(0, 4, 1)], {"max_timeline_points": 1}, InvalidArgumentError, "max_timeline_points must be >= 2"),
        (
            [(0, 4, 1)],
            {"max_tokens": np.ones(2, np.int32)},
            InvalidArgumentError,
            "max_tokens must have 1 values, got 2",
        ),
        ([(0, 4, 1)], {"tenants": np.ones(2, np.int32)}, InvalidArgumentError, "tenants must have 1 values, got 2"),
        ([(0, 4, 1)], {"priorities": np.ones(3, np.int32)}, InvalidArgumentError, "priorities must have 1"),
        ([(0, 4, 3)], {"step_durations_us": np.array([9, 9])}, InvalidArgumentError, "has 2 steps, and there are more"),
        (
            [(0, 4, 3)],
            {"step_durations_us": np.array([9, 0, 9])},
            InvalidArgumentError,
            "000, got 0 for step 1",
        ),
        ([(0, 4, 3)], {"step_durations_us": np.array([2**62])}, InvalidArgumentError, "step_durations_us must be in 1"),
        ([(2**62, 4, 3)], {}, InvalidArgumentError, "request 0: arrivals must be <= 10+ us, got 4611686018427387904"),
        ([(0, 4, 3)], {"fields": {"step_us": 1e300}}, InvalidArgumentError, "a step takes longer than 30 years"),
        ([(0, 2**31 - 1, 1)], {}, RequestTooLongError, "request 0: the prompt has 2147483647 tokens"),
        (
            [(0, 4, 1)],
            {"segment_contents": np.zeros(1, np.int64), "segment_lengths": np.full(1, 4, np.int32)},
            InvalidArgumentError,
            "segments need segment_offsets",
        ),
        (
            [(0, 4, 3)],
            {"step_durations_us": np.array([9]), "num_replicas": 2},
            InvalidArgumentError,
            "are of one replica, but num_replicas is 2",
        ),
    ],
)
def test_bad_input(requests: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(requests, **options)


@pytest.mark.parametrize(
    ("offsets", "lengths", "message"),
    [
        ([0, 1], [4], "segment_offsets must have 3 values, got 2"),
        ([1, 1, 2], [4, 4], "from 0 to the number of segments"),
        ([0, 1, 3], [4, 4], "from 0 to the number of segments"),
        ([0, 2, 2], [4, 4], "request 1: its prompt must have at least 1 segment"),
        ([0, 50, 2], [4, 4], "request 1: its prompt must have at least 1 segment"),
        ([0, 1, 2], [4, 5], "request 1: its segments have 5 tokens, its prompt 4"),
        ([0, 1, 2], [-4, 4], "request 0: segment_lengths must be >= 0, got -4"),
    ],
)
def test_bad_segments(offsets: list[int], lengths: list[int], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        run(
            [(0, 4, 1), (0, 4, 1)],
            segment_offsets=np.array(offsets, np.int64),
            segment_contents=np.zeros(len(lengths), np.int64),
            segment_lengths=np.array(lengths, np.int32),
        )


def test_columns_of_another_type_are_no_columns() -> None:
    with pytest.raises(TypeError):
        run([(0, 4, 1)], max_tokens=np.ones(1))


def test_an_error_of_report_ends_it() -> None:
    def report(num_finished: int) -> None:
        raise InvalidRequestError("enough")

    with pytest.raises(InvalidRequestError, match="enough"):
        run(draw(10, 1), report=report)


def test_report_counts_to_the_end() -> None:
    seen: list[int] = []
    run(draw(3000, 2), report=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 3000
    assert len(seen) > 3
