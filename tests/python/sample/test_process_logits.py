"""What parameters do to a row of logits before temperature: against transformers' processors and by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from steploop import _C
from steploop._C import SamplingParams

VOCAB_SIZE = 200


def process(logits, *, masked=(), bitmask=None, prompt=(), output=(), **params):
    return _C.process_logits(
        np.asarray(logits, dtype=np.float32),
        SamplingParams(**params),
        masked_token_ids=list(masked),
        bitmask=bitmask,
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
    )


def random_logits(seed, size=VOCAB_SIZE):
    return np.random.default_rng(seed).normal(scale=4, size=size).astype(np.float32)


def of_transformers(processor, logits, prompt, output):
    token_ids = torch.tensor([[*prompt, *output]])
    return processor(token_ids, torch.from_numpy(logits.copy())[None])[0].numpy()


TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30)


def test_nothing_asked_for_changes_nothing():
    logits = random_logits(0)
    np.testing.assert_array_equal(process(logits, prompt=[1, 2], output=[3]), logits)


@given(prompt=TOKENS, output=TOKENS, penalty=st.sampled_from([0.5, 1.1, 1.7, 30.0]), seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_repetition_penalty(prompt, output, penalty, seed):
    logits = random_logits(seed)
    expected = logits
    if prompt or output:
        expected = of_transformers(RepetitionPenaltyLogitsProcessor(penalty), logits, prompt, output)
    got = process(logits, repetition_penalty=penalty, prompt=prompt, output=output)
    np.testing.assert_allclose(got, expected, rtol=2e-7)


@given(
    prompt=TOKENS,
    output=TOKENS,
    presence=st.sampled_from([-2.0, 0.0, 0.3, 2.0]),
    frequency=st.sampled_from([-0.5, 0.0, 2.0]),
    repetition=st.sampled_from([1.0, 1.3]),
)
@settings(max_examples=100, deadline=None)
def test_penalties_count_as_vllm_does(prompt, output, presence, frequency, repetition):
    """Repetition sees prompt and output; presence and frequency see the output, after it."""
    logits = random_logits(1)
    expected = logits.astype(np.float64)
    seen = sorted({*prompt, *output})
    expected[seen] = np.where(expected[seen] > 0, expected[seen] / repetition, expected[seen] * repetition)
    counts = np.bincount(np.array(output, dtype=int), minlength=VOCAB_SIZE)
    expected -= frequency * counts + presence * (counts > 0)
    params = {"presence_penalty": presence, "frequency_penalty": frequency, "repetition_penalty": repetition}
    got = process(logits, prompt=prompt, output=output, **params)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_penalties_by_hand():
    logits = [2.0, -2.0, 1.0, 0.0]
    params = {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    got = process(logits, prompt=[0, 1], output=[1, 2, 2], **params)
    #                 2 / 2, -2 * 2 - 0.5 - 0.25, 1 / 2 - 2 * 0.5 - 0.25, unseen
    np.testing.assert_array_equal(got, [1.0, -4.75, -0.75, 0.0])


@given(bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-100, 100, width=32), max_size=20))
@settings(max_examples=50, deadline=None)
def test_logit_bias(bias):
    logits = random_logits(2)
    expected = logits
    if bias:
        processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
        expected = of_transformers(processor, logits, [1], [])
    np.testing.assert_allclose(process(logits, logit_bias=list(bias.items())), expected, rtol=1e-6, atol=1e-6)


@given(
    words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=6),
    output=st.lists(st.integers(0, 4), max_size=8),
)
@settings(max_examples=300, deadline=None)
def test_bad_words(words, output):
    logits = random_logits(3, size=6)
    # transformers looks at the prompt, too; a token that is in no word stands for one here.
    expected = of_transformers(NoBadWordsLogitsProcessor(words, eos_token_id=[]), logits, [5], output)
    np.testing.assert_array_equal(process(logits, bad_words=words, prompt=[5], output=output), expected)


def test_bad_words_begin_in_the_output():
    logits = random_logits(3)
    params = {"bad_words": [[7, 8]]}
    np.testing.assert_array_equal(process(logits, prompt=[7], **params), logits)
    assert process(logits, prompt=[1], output=[7], **params)[8] == -np.inf


@given(allowed=st.sets(st.integers(0, VOCAB_SIZE - 1), min_size=1))
@settings(max_examples=50, deadline=None)
def test_allowed_token_ids(allowed):
    logits = random_logits(4)
    others = sorted(set(range(VOCAB_SIZE)) - allowed)
    expected = of_transformers(SuppressTokensLogitsProcessor(others), logits, [1], []) if others else logits
    np.testing.assert_array_equal(process(logits, allowed_token_ids=sorted(allowed)), expected)


def test_what_is_ruled_out_stays_out():
    logits = np.zeros(64, dtype=np.float32)
    bitmask = np.array([0b11111, 0], dtype=np.int32)
    got = process(
        logits,
        bitmask=bitmask,
        masked=[2],
        allowed_token_ids=[1, 2, 3, 4, 40],
        bad_words=[[3]],
        logit_bias=[(0, 100.0), (2, 100.0), (3, 100.0), (4, 1.0), (40, 100.0)],
        presence_penalty=-2.0,
        output=[0, 2, 3, 4, 40],
    )
    assert np.flatnonzero(np.isfinite(got)).tolist() == [1, 4]
    assert got[[1, 4]].tolist() == [0.0, 3.0]


def test_finite_logits_stay_finite():
    logits = [3e38, -3e38, 1.0]
    got = process(logits, repetition_penalty=1e-30, logit_bias=[(2, 1e38)], output=[0, 1, 2])
    assert np.isfinite(got).all()
    assert np.isfinite(process(logits, repetition_penalty=1e30, output=[0, 1, 2])).all()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 2.0, "top_k": 1}])
def test_the_likeliest_token_is_taken_after_all_of_it(params):
    logits = np.array([5.0, 4.0, 3.0, 2.0], dtype=np.float32)

    def chosen(**more):
        prompt, output = more.pop("prompt", []), more.pop("output", [])
        native = SamplingParams(**params, **more)
        return _C.sample(logits, native, seed=0, prompt_token_ids=prompt, output_token_ids=output)[0]

    assert chosen() == 0
    assert chosen(logit_bias=[(3, 4.0)]) == 3
    assert chosen(allowed_token_ids=[2, 3]) == 2
    assert chosen(bad_words=[[0], [1]]) == 2
    assert chosen(repetition_penalty=1.5, prompt=[0]) == 1
    assert chosen(presence_penalty=1.5, output=[0]) == 1
    assert chosen(frequency_penalty=0.6, output=[0, 0]) == 1
    assert chosen(frequency_penalty=0.8, output=[0, 0, 0, 1, 1]) == 2


def test_a_full_row_of_counts():
    """Every token of a vocabulary, many times."""
    generator = np.random.default_rng(5)
    output = generator.permutation(np.repeat(np.arange(VOCAB_SIZE), 3))
    got = process(np.zeros(VOCAB_SIZE), output=output.tolist(), frequency_penalty=1.0)
    np.testing.assert_array_equal(got, np.full(VOCAB_SIZE, -3.0))
