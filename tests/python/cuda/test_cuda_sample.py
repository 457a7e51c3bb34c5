"""The CUDA sampler against the CPU's, and against the cumulative distribution that it inverts."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steploop import _C
from steploop._C import SamplingParams

ORDERS = st.tuples(st.sampled_from(["forward", "reverse", "random"]), st.integers(0, 99))


def sample(ops, logits, rows, want_logprob=False, masked_tokens=None):
    """rows: a dict of temperature, top_k, top_p, seed, sample_index, position per row."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0, "sample_index": 0, "position": 0}
    dtypes = [torch.float64, torch.int32, torch.float64, torch.int64, torch.int32, torch.int64]
    columns = [
        torch.tensor([row.get(name, default) for row in rows], dtype=dtype)
        for (name, default), dtype in zip(defaults.items(), dtypes, strict=True)
    ]
    on_device = torch.as_tensor(np.asarray(logits, dtype=np.float32)).to(ops.device)
    before = on_device.clone()
    tokens, logprobs, failed = ops.sample(on_device, *columns, want_logprob, masked_tokens)
    assert (tokens.dtype, logprobs.dtype, failed.dtype) == (torch.int32, torch.float32, torch.int32)
    # The very bits: a NaN is not equal to itself.
    assert torch.equal(on_device.view(torch.int32), before.view(torch.int32))
    return tokens.tolist(), logprobs.tolist(), failed.tolist()


def cpu_sample(logits, row, want_logprob=False, masked=()):
    """(token, logprob, failed) of one row."""
    row = dict(row)
    where = {name: row.pop(name, 0) for name in ("seed", "sample_index", "position")}
    params = SamplingParams(**row, logprobs=0 if want_logprob else None)
    logits = np.ascontiguousarray(logits, dtype=np.float32)
    token, logprob, _, failed = _C.sample(logits, params, **where, masked_token_ids=list(masked))
    return token, logprob, failed


def random_logits(generator, size, kind):
    if kind == "normal":
        logits = generator.normal(scale=4, size=size)
    elif kind == "ties":
        logits = generator.integers(-3, 4, size=size).astype(float)
    elif kind == "flat":
        logits = generator.normal(scale=0.01, size=size)
    else:
        logits = generator.normal(size=size)
        logits[generator.integers(size)] += 15
    if generator.random() < 0.5:
        logits[generator.random(size) < 0.5] = -np.inf
        logits[generator.integers(size)] = 0
    return logits.astype(np.float32)


def is_in_its_cell(token, logits, row):
    """Whether the token's cell of the cumulative distribution holds the number drawn, up to rounding."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / row["temperature"])
    order = np.arange(len(logits))
    cut = 0 < row["top_k"] < len(logits) or row["top_p"] < 1
    if cut:
        order = np.lexsort((order, -logits))
        order = order[: row["top_k"] or len(order)]
        shares = np.cumsum(weights[order]) / weights[order].sum()
        if row["top_p"] < 1:
            # A threshold that falls on the edge of a token may be rounded to either side.
            counts = [int((shares < row["top_p"] + slack).sum()) + 1 for slack in (-1e-6, 1e-6)]
            if counts[0] != counts[1]:
                return token in order[: counts[1]]
            order = order[: counts[0]]
    ends = np.cumsum(weights[order]) / weights[order].sum()
    index = int(np.flatnonzero(order == token)[0])
    number = _C.uniform(seed=row["seed"], sample_index=row["sample_index"], position=row["position"])
    return (ends[index - 1] if index else 0) - 2e-6 <= number <= ends[index] + 2e-6


@st.composite
def rows(draw):
    return {
        "temperature": draw(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7, 20.0])),
        "top_k": draw(st.sampled_from([0, 0, 1, 2, 10, 64, 200])),
        "top_p": draw(st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.999])),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "sample_index": draw(st.integers(0, 9)),
        "position": draw(st.integers(0, 2**40)),
    }


@given(
    size=st.sampled_from([1, 2, 3, 40, 255, 256, 257, 700, 3000]),
    kind=st.sampled_from(["normal", "ties", "flat", "peaked"]),
    rows=st.lists(rows(), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
    order=ORDERS,
)
@settings(max_examples=30, deadline=None)
def test_draws_like_the_cpu(ops, size, kind, rows, seed, order):
    ops.emulate(*order)
    generator = np.random.default_rng(seed)
    logits = np.stack([random_logits(generator, size, kind) for _ in rows])
    tokens, _, failed = sample(ops, logits, rows)
    assert not any(failed)
    for token, one, row in zip(tokens, logits, rows, strict=True):
        if token != cpu_sample(one, row)[0]:  # the number lies where the sums of both round differently
            assert row["temperature"] > 0
            assert row["top_k"] != 1
            assert is_in_its_cell(token, one, row)


def test_nearly_all_draws_are_the_cpus(ops):
    """A rounding that decides is rare; and the tokens of one row in a batch are those of the row alone."""
    ops.emulate("random", seed=7)
    generator = np.random.default_rng(0)
    logits = np.stack([random_logits(generator, 1000, "normal") for _ in range(4)] * 24)
    cuts = [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.8}]
    rows = [{"seed": i, "position": 3 * i, **cuts[i // 4 % 4]} for i in range(len(logits))]
    tokens, _, _ = sample(ops, logits, rows)
    expected = [cpu_sample(one, row)[0] for one, row in zip(logits, rows, strict=True)]
    assert sum(got != token for got, token in zip(tokens, expected, strict=True)) <= 1
    for i in (0, 41, 95):
        assert sample(ops, logits[i : i + 1], rows[i : i + 1])[0] == [tokens[i]]


def test_log_probabilities(ops):
    ops.emulate("reverse")
    generator = np.random.default_rng(1)
    logits = np.stack([random_logits(generator, 2000, "normal") for _ in range(4)])
    rows = [{"temperature": 0.0}, {"temperature": 2.0}, {"top_k": 1}, {"top_p": 0.5}]
    tokens, logprobs, _ = sample(ops, logits, rows, want_logprob=True)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1)[range(4), tokens]
    torch.testing.assert_close(torch.tensor(logprobs).double(), expected, rtol=1e-5, atol=1e-5)
    assert sample(ops, logits, rows)[1] == [0.0] * 4


def test_broken_rows_fail_alone(ops):
    ops.emulate("forward")
    logits = np.zeros((5, 300), dtype=np.float32)
    logits[:, 7] = 9
    logits[1, 250], logits[2, 3], logits[3] = np.nan, np.inf, -np.inf
    for params in ({"temperature": 0.0}, {"temperature": 0.01}):
        tokens, _, failed = sample(ops, logits, [params] * 5, want_logprob=True)
        assert tokens == [7, -1, -1, -1, 7]
        assert failed == [0, 1, 1, 1, 0]


def test_masked_tokens_do_not_come(ops):
    ops.emulate("random", seed=2)
    generator = np.random.default_rng(3)
    logits = np.stack([random_logits(generator, 400, "peaked") for _ in range(6)])
    best = torch.from_numpy(logits).topk(64).indices.int()
    masks = torch.full((6, 64), -1, dtype=torch.int32)
    for row, count in enumerate([0, 1, 2, 5, 63, 64]):
        masks[row, 64 - count :] = best[row, :count]
    for params in ({"temperature": 0.0}, {"temperature": 1.5, "seed": 4}, {"top_k": 3}, {"top_p": 0.7}):
        tokens, logprobs, failed = sample(ops, logits, [params] * 6, True, masks)
        for row in range(6):
            masked = [token for token in masks[row].tolist() if token >= 0]
            token, logprob, cpu_failed = cpu_sample(logits[row], params, True, masked)
            assert (tokens[row], bool(failed[row])) == (token, cpu_failed)
            assert abs(logprobs[row] - logprob) < 1e-4
    # Nothing that may come.
    everything = torch.arange(64, dtype=torch.int32)[None]
    assert sample(ops, np.zeros((1, 64)), [{}], True, everything)[2] == [1]


def test_a_large_vocabulary(ops):
    ops.emulate("forward")
    generator = np.random.default_rng(5)
    logits = np.stack([random_logits(generator, 151_937, kind) for kind in ("flat", "normal")])
    rows = [{"top_p": 0.95, "seed": 1}, {"temperature": 0.8, "top_k": 50, "seed": 2}]
    assert sample(ops, logits, rows)[0] == [cpu_sample(one, row)[0] for one, row in zip(logits, rows, strict=True)]
