"""The sampler of one row against a few lines of numpy and torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steploop import _C
from steploop._C import SamplingParams

VOCAB_SIZES = [1, 2, 31, 33, 63, 64, 65, 1000, 4099]


def sample(logits, *, seed=0, sample_index=0, position=0, masked_token_ids=(), bitmask=None, **params):
    return _C.sample(
        np.asarray(logits, dtype=np.float32),
        SamplingParams(**params),
        seed=seed,
        sample_index=sample_index,
        position=position,
        masked_token_ids=list(masked_token_ids),
        bitmask=bitmask,
    )


def pack_bitmask(allowed):
    bits = np.zeros(-(-len(allowed) // 32) * 32, dtype=np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


def softmax(logits, temperature=1.0):
    with np.errstate(over="ignore"):
        scaled = np.asarray(logits, dtype=np.float64) / temperature
        weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def kept_by_rank(logits, *, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0, slack=0.0):
    """Token ids that survive, by rank, and their renormalised probabilities. slack moves the thresholds of min_p and
    top_p."""
    ranks = np.lexsort((np.arange(len(logits)), -np.asarray(logits)))
    probabilities = softmax(logits, temperature)[ranks]
    if min_p > 0:
        count = max(1, int((probabilities >= min_p * (1 - slack) * probabilities[0]).sum()))
        ranks, probabilities = ranks[:count], probabilities[:count]
    if 0 < top_k < len(ranks):
        ranks, probabilities = ranks[:top_k], probabilities[:top_k]
    probabilities = probabilities / probabilities.sum()
    if top_p < 1:
        count = min(int((np.cumsum(probabilities) < top_p + slack).sum()) + 1, len(ranks))
        ranks, probabilities = ranks[:count], probabilities[:count]
    return ranks, probabilities / probabilities.sum()


def random_logits(size, seed, spread=3.0):
    return np.random.default_rng(seed).normal(scale=spread, size=size).astype(np.float32)


# ---- Greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", VOCAB_SIZES)
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 9e-6}, {"temperature": 5.0, "top_k": 1}])
def test_greedy_takes_the_maximum(size, params):
    for seed in range(20):
        logits = random_logits(size, seed)
        assert sample(logits, seed=seed, **params) == (int(logits.argmax()), 0.0, [], False)


@pytest.mark.parametrize("size", VOCAB_SIZES)
def test_greedy_finds_the_maximum_wherever_it_is(size):
    for token in range(0, size, max(1, size // 70)):
        logits = np.zeros(size)
        logits[token] = 1e-30
        assert sample(logits, temperature=0.0)[0] == token


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1}])
@pytest.mark.parametrize("ties", [(7, 9), (7, 70, 700), (63, 64), (999, 0), (500, 516)])
def test_greedy_ties_go_to_the_lowest_id(params, ties):
    logits = random_logits(1000, seed=4)
    logits[list(ties)] = 50.0
    assert sample(logits, **params)[0] == min(ties)


def test_positive_and_negative_zero_tie():
    assert sample([-1.0, -0.0, 0.0], temperature=0.0)[0] == 1
    assert {sample([-9.0, -0.0, 0.0], top_k=2, position=i)[0] for i in range(50)} == {1, 2}
    assert sample([-9.0, -0.0, 0.0], top_p=1e-6)[0] == 1


# ---- What top_k and top_p keep ---------------------------------------------------------------------------------------


def drawn_tokens(logits, count=400, **params):
    return {sample(logits, position=position, **params)[0] for position in range(count)}


def test_top_k_keeps_exactly_k_and_ties_go_to_the_lowest_ids():
    logits = np.full(300, -1.0)
    logits[[250, 40, 130, 299]] = 2.0
    logits[[5, 6, 290]] = 1.5
    assert drawn_tokens(logits, top_k=2) == {40, 130}
    assert drawn_tokens(logits, top_k=4) == {40, 130, 250, 299}
    assert drawn_tokens(logits, top_k=6) == {40, 130, 250, 299, 5, 6}
    assert drawn_tokens(np.zeros(200), top_k=3) == {0, 1, 2}


@pytest.mark.parametrize("top_k", [0, -1, 4, 5, 1000])
def test_top_k_of_all_or_more_keeps_all(top_k):
    assert drawn_tokens([0.1, 0.2, 0.3, 0.4], top_k=top_k) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = np.log([0.05, 0.5, 0.15, 0.3])
    assert drawn_tokens(logits, top_p=0.4) == {1}
    assert drawn_tokens(logits, top_p=0.499) == {1}
    assert drawn_tokens(logits, top_p=0.51) == {1, 3}
    assert drawn_tokens(logits, top_p=0.81) == {1, 2, 3}
    assert drawn_tokens(logits, top_p=0.951) == {0, 1, 2, 3}
    assert drawn_tokens(logits, top_p=1e-12) == {1}


def test_top_p_ties_go_to_the_lowest_ids():
    assert drawn_tokens(np.zeros(100), top_p=0.035) == {0, 1, 2, 3}
    assert drawn_tokens([1.0, 3.0, 3.0, 3.0, 3.0], top_p=0.4) == {1, 2}


def test_top_p_counts_over_what_top_k_kept():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    # Of the two kept, the first holds 4/7 = 0.571: enough for 0.57, though it is 0.4 of everything.
    assert drawn_tokens(logits, top_k=2, top_p=0.57) == {0}
    assert drawn_tokens(logits, top_k=2, top_p=0.58) == {0, 1}


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest():
    logits = np.log([0.05, 0.5, 0.15, 0.3])
    assert drawn_tokens(logits, min_p=0.11) == {1, 2, 3}
    assert drawn_tokens(logits, min_p=0.09) == {0, 1, 2, 3}
    assert drawn_tokens(logits, min_p=0.59) == {1, 3}
    assert drawn_tokens(logits, min_p=1.0) == {1}
    assert drawn_tokens(logits, min_p=1e-300) == {0, 1, 2, 3}
    assert drawn_tokens([2.0, 2.0, 1.0], min_p=1.0) == {0, 1}


def test_min_p_comes_after_temperature_and_before_top_k_and_top_p():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert drawn_tokens(logits, min_p=0.6) == {0, 1}
    assert drawn_tokens(logits, min_p=0.6, temperature=0.5) == {0}  # 0.16 and 0.09: 0.56 of it
    assert drawn_tokens(logits, min_p=0.3, top_k=2) == {0, 1}
    assert drawn_tokens(logits, min_p=0.6, top_k=3) == {0, 1}
    # Of the two kept, the first holds 0.571 of the probability.
    assert drawn_tokens(logits, min_p=0.6, top_p=0.57) == {0}
    assert drawn_tokens(logits, min_p=0.6, top_p=0.58) == {0, 1}
    assert drawn_tokens(logits, min_p=0.3, top_k=2, top_p=0.58) == {0, 1}


def test_temperature_comes_before_top_p():
    logits = np.log([0.6, 0.3, 0.1])
    assert drawn_tokens(logits, top_p=0.7) == {0, 1}
    assert drawn_tokens(logits, top_p=0.7, temperature=0.5) == {0}  # 0.36, 0.09, 0.01 over 0.46
    assert drawn_tokens(logits, top_p=0.7, temperature=10.0) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 0.05, 1e30, 1e300])
@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.2}])
def test_extreme_temperatures_and_logits(temperature, cut):
    for logits in (random_logits(500, 1), random_logits(500, 2) * 1e36, random_logits(500, 3) * 1e-30):
        logits = np.where(np.arange(500) % 3 == 0, -np.inf, logits).astype(np.float32)
        for position in range(20):
            token, _, _, failed = sample(logits, temperature=temperature, position=position, **cut)
            assert not failed
            assert np.isfinite(logits[token])
    if temperature <= 1e-3:
        assert sample(random_logits(500, 1), temperature=temperature, **cut)[0] == random_logits(500, 1).argmax()


# ---- The draw --------------------------------------------------------------------------------------------------------

CUTS = st.sampled_from([0, 0, 2, 3, 10, 64, 200]), st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.95, 0.999])


@st.composite
def rows(draw):
    size = draw(st.sampled_from([1, 2, 3, 40, 63, 64, 65, 130, 700, 3000]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["normal", "ties", "flat", "peaked"]))
    if kind == "normal":
        logits = generator.normal(scale=4, size=size)
    elif kind == "ties":
        logits = generator.integers(-3, 4, size=size).astype(float)
    elif kind == "flat":
        logits = generator.normal(scale=0.01, size=size)
    else:
        logits = generator.normal(size=size)
        logits[generator.integers(size)] += 15
    if draw(st.booleans()):
        logits[generator.random(size) < 0.5] = -np.inf
    if np.isinf(logits).all():
        logits[generator.integers(size)] = 0
    return logits.astype(np.float32)


def assert_is_the_inverse_of_the_cumulative_distribution(token, tokens, probabilities, number):
    """token's cell of the cumulative distribution over tokens holds number, up to rounding."""
    ends = np.cumsum(probabilities)
    index = int(np.flatnonzero(tokens == token)[0])
    assert ends[index] - probabilities[index] - 2e-6 <= number <= ends[index] + 2e-6


@given(
    logits=rows(),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7, 20.0]),
    top_k=CUTS[0],
    top_p=CUTS[1],
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.3, 0.9]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**40),
)
@settings(max_examples=800, deadline=None)
def test_draw_is_the_inverse_of_the_cumulative_distribution(logits, temperature, top_k, top_p, min_p, seed, position):
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    token, _, _, failed = sample(logits, seed=seed, position=position, **params)
    assert not failed
    assert np.isfinite(logits[token])
    number = _C.uniform(seed=seed, sample_index=0, position=position)
    if not 0 < top_k < len(logits) and top_p == 1 and min_p == 0:
        tokens, probabilities = np.arange(len(logits)), softmax(logits, temperature)
        assert_is_the_inverse_of_the_cumulative_distribution(token, tokens, probabilities, number)
        return
    # A threshold that falls on the edge of a token may be rounded to either side.
    fewest, _ = kept_by_rank(logits, **params, slack=-1e-6)
    most, _ = kept_by_rank(logits, **params, slack=1e-6)
    assert token in most
    if len(fewest) == len(most):
        assert_is_the_inverse_of_the_cumulative_distribution(token, *kept_by_rank(logits, **params), number)


@pytest.mark.parametrize(
    "cut", [{}, {"top_k": 12}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.8}, {"min_p": 0.05}, {"min_p": 0.1, "top_k": 9}]
)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_distribution(cut, temperature):
    logits = random_logits(50, seed=11, spread=1.5)
    tokens, probabilities = kept_by_rank(logits, temperature=temperature, **cut)
    num_draws = 100_000
    counts = np.zeros(len(logits))
    params = SamplingParams(temperature=temperature, **cut)
    for position in range(num_draws):
        counts[_C.sample(logits, params, seed=77, position=position)[0]] += 1
    assert counts[tokens].sum() == num_draws
    expected = num_draws * probabilities
    often = expected >= 5
    chi_square = ((counts[tokens] - expected)[often] ** 2 / expected[often]).sum()
    degrees = max(1, int(often.sum()) - 1)
    # Wilson-Hilferty: the normal score of a chi-square value. Seeds are fixed, so it is the same in every run.
    score = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))
    assert -3.5 < score < 3.5


@pytest.mark.parametrize("cut", [{}, {"top_k": 40}, {"top_p": 0.95}])
def test_large_vocabulary_follows_the_distribution(cut):
    logits = random_logits(49_152, seed=5)
    logits[[100, 40_000, 49_151]] = [14.0, 13.5, 13.0]
    tokens, probabilities = kept_by_rank(logits, **cut)
    expected = dict(zip(tokens.tolist(), probabilities, strict=True))
    num_draws = 1_000
    drawn = [sample(logits, seed=8, position=position, **cut)[0] for position in range(num_draws)]
    for token in (100, 40_000, 49_151):
        deviation = np.sqrt(num_draws * expected[token] * (1 - expected[token]))
        assert abs(drawn.count(token) - num_draws * expected[token]) < 4 * deviation
    assert set(drawn) <= set(tokens.tolist())


def test_draws_repeat_and_depend_on_seed_sample_and_position():
    logits = np.zeros(5000)
    base = {"seed": 5, "sample_index": 2, "position": 9}
    token = sample(logits, **base)[0]
    for cut in ({}, {"top_k": 4000}, {"top_p": 0.9}):
        assert len({sample(logits, **base, **cut)[0] for _ in range(5)}) == 1
    for change in ({"seed": 6}, {"seed": 5 + 2**32}, {"sample_index": 3}, {"position": 10}, {"position": 9 + 2**32}):
        assert sample(logits, **(base | change))[0] != token


def test_rows_beside_do_not_matter():
    # The same values at another address and alignment.
    logits = random_logits(4099, seed=3)
    padded = np.full(5000, 99.0, dtype=np.float32)
    for offset in (1, 2, 3, 5, 16):
        view = padded[offset : offset + len(logits)]
        view[:] = logits
        for cut in ({}, {"top_k": 50}, {"top_p": 0.95}, {"temperature": 0.0}):
            for position in range(5):
                expected = sample(logits, position=position, logprobs=20, **cut)
                params = SamplingParams(logprobs=20, **cut)
                assert _C.sample(view, params, seed=0, position=position) == expected


# ---- Masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}])
def test_masked_tokens_never_come(params):
    logits = random_logits(130, seed=2)
    best = np.argsort(-logits)
    masked = [int(best[0]), int(best[1]), 5, 5, 130, 2**31 - 1, -1]  # ids past the vocabulary mask nothing
    tokens = {sample(logits, position=i, masked_token_ids=masked, **params)[0] for i in range(300)}
    assert not tokens & set(masked)
    if params.get("temperature") == 0.0:
        assert tokens == {int(best[2])}


@given(logits=rows(), data=st.data(), top_k=CUTS[0], top_p=CUTS[1], greedy=st.booleans())
@settings(max_examples=300, deadline=None)
def test_bitmask_equals_logits_of_minus_infinity(logits, data, top_k, top_p, greedy):
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    allowed = generator.random(len(logits)) < data.draw(st.sampled_from([0.02, 0.5, 0.98]))
    params = {"temperature": 0.0 if greedy else 0.9, "top_k": top_k, "top_p": top_p}
    masked_logits = np.where(allowed, logits, -np.inf)
    expected = sample(masked_logits, seed=1, **params)
    got = sample(logits, seed=1, bitmask=pack_bitmask(allowed), **params)
    assert got == expected
    assert got[3] == bool(np.isneginf(masked_logits).all())
    assert got[3] or allowed[got[0]]


def test_bits_past_the_vocabulary_are_ignored():
    bitmask = pack_bitmask(np.arange(33) == 32) | np.array([0, -2], dtype=np.int32)
    assert {sample(np.zeros(33), position=i, bitmask=bitmask)[0] for i in range(50)} == {32}


def test_bitmask_and_masked_tokens_together():
    allowed = np.isin(np.arange(70), [3, 40, 69])
    logits = np.arange(70.0)
    assert sample(logits, temperature=0.0, bitmask=pack_bitmask(allowed), masked_token_ids=[69])[0] == 40
    token, _, _, failed = sample(logits, bitmask=pack_bitmask(allowed), masked_token_ids=[3, 40, 69])
    assert failed
    assert token == -1


# ---- Rows that cannot be sampled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("size", VOCAB_SIZES)
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2, "logprobs": 3}])
def test_nan_and_infinity_fail_the_row(bad, size, params):
    for token in {0, size // 2, size - 1}:
        logits = random_logits(size, seed=1)
        logits[token] = bad
        assert sample(logits, **params) == (-1, 0.0, [], True)
        # A mask hides no broken row.
        assert sample(logits, masked_token_ids=[token], **params)[3]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5, "logprobs": 2}])
def test_nothing_allowed_fails_the_row(params):
    assert sample(np.full(100, -np.inf), **params) == (-1, 0.0, [], True)
    assert sample(np.zeros(100), bitmask=np.zeros(4, dtype=np.int32), **params) == (-1, 0.0, [], True)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 1e300}])
def test_minus_infinity_is_a_token_that_never_comes(params):
    logits = np.full(200, -np.inf)
    logits[77] = -1e30
    assert {sample(logits, position=i, **params)[0] for i in range(50)} == {77}


# ---- Log-probabilities -----------------------------------------------------------------------------------------------


@given(
    logits=rows(),
    logprobs=st.integers(0, 20),
    params=st.sampled_from([{"temperature": 0.0}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}]),
    offset=st.sampled_from([0.0, 1e4, -1e4]),
)
@settings(max_examples=300, deadline=None)
def test_logprobs_are_those_of_the_raw_row(logits, logprobs, params, offset):
    logits = (logits + np.float32(offset)).astype(np.float32)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=0).numpy()
    token, logprob, top, failed = sample(logits, logprobs=logprobs, **params)
    assert not failed
    assert abs(logprob - expected[token]) <= 1e-5
    ranks = [int(i) for i in np.lexsort((np.arange(len(logits)), -logits)) if np.isfinite(logits[i])][:logprobs]
    assert [entry[0] for entry in top] == ranks
    np.testing.assert_allclose([entry[1] for entry in top], expected[ranks], rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [49_152, 151_936])
def test_logprobs_of_large_vocabularies(size):
    for spread in (0.01, 3.0, 30.0):
        logits = random_logits(size, seed=9, spread=spread)
        expected = torch.log_softmax(torch.from_numpy(logits), dim=0)
        token, logprob, top, _ = sample(logits, temperature=0.0, logprobs=20)
        values, indices = expected.topk(20)
        assert token == indices[0]
        assert [entry[0] for entry in top] == indices.tolist()
        np.testing.assert_allclose([entry[1] for entry in top], values.numpy(), rtol=0, atol=1e-5)
        assert logprob == top[0][1]


def test_logprobs_ignore_masks_and_temperature():
    logits = random_logits(100, seed=6)
    expected = torch.log_softmax(torch.from_numpy(logits), dim=0).numpy()
    best = int(logits.argmax())
    params = {"temperature": 0.1, "logprobs": 1}
    token, logprob, top, _ = sample(logits, masked_token_ids=[best], **params)
    assert token != best
    assert logprob == pytest.approx(expected[token], abs=1e-5)
    assert top == [(best, pytest.approx(expected[best], abs=1e-5))]


def test_asking_for_logprobs_changes_no_token():
    logits = random_logits(3000, seed=12)
    for params in ({"temperature": 0.0}, {}, {"top_k": 30}, {"top_p": 0.9}):
        for position in range(20):
            plain = sample(logits, position=position, **params)[0]
            assert sample(logits, position=position, logprobs=20, **params)[0] == plain
