"""Incremental text equals the text of all tokens at once, whatever is cut where."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from steploop.detokenizer import Detokenizer
from steploop.tokenizer import Tokenizer

EMOJI = "héllo 😀👩‍👩‍👧‍👦 汉字 \u0301ꙮ 🇩🇪 नमस्ते \ufffd x"

relaxed = settings(max_examples=300, deadline=None)

# Mostly real text, with single bytes, broken characters and special tokens between.
texts = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(["😀", "👩‍👧", "汉", "é", " ", "\n\n", "\ufffd", " the", "<|im_end|>", EMOJI]),
    ),
    max_size=8,
).map("".join)


def pieces_of(
    tokenizer: Tokenizer, prompt: Sequence[int], token_ids: Sequence[int], *, skip: bool = False
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.append([token_id]) for token_id in token_ids), detokenizer.flush()]


@relaxed
@given(text=texts, skip=st.booleans())
@example(text=EMOJI, skip=False)
@example(text="\ufffd" * 40 + "x", skip=False)
def test_text(smollm: Tokenizer, text: str, skip: bool) -> None:
    token_ids = smollm.encode(text)
    pieces = pieces_of(smollm, [], token_ids, skip=skip)
    whole = smollm.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        # No piece shows half a character, although most of these are spread over tokens.
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=2000, deadline=None)
@given(token_ids=st.lists(st.one_of(st.integers(0, 600), st.integers(0, 49151)), max_size=60), skip=st.booleans())
def test_any_tokens(smollm: Tokenizer, token_ids: list[int], skip: bool) -> None:
    """The first ids are single bytes: random ones are mostly no UTF-8 at all."""
    assert "".join(pieces_of(smollm, [], token_ids, skip=skip)) == smollm.decode(token_ids, skip_special_tokens=skip)


@relaxed
@given(text=texts, cut=st.integers(0, 80))
def test_after_a_prompt(smollm: Tokenizer, text: str, cut: int) -> None:
    """Also where the prompt ends in the middle of a character: the character belongs to the new text."""
    token_ids = smollm.encode(text)
    prompt, new = token_ids[:cut], token_ids[cut:]
    before = smollm.decode(prompt)
    whole = smollm.decode(token_ids)
    generated = "".join(pieces_of(smollm, prompt, new))
    assert whole in (before + generated, before.removesuffix("\ufffd") + generated)


def test_character_begun_in_the_prompt(smollm: Tokenizer) -> None:
    token_ids = smollm.encode("x😀")
    assert len(token_ids) > 2
    for cut in range(1, len(token_ids)):
        assert "".join(pieces_of(smollm, token_ids[:cut], token_ids[cut:])) == "😀"


def test_unfinished_character_is_flushed(smollm: Tokenizer) -> None:
    token_ids = smollm.encode("x😀")[:-1]
    detokenizer = Detokenizer(smollm, [], skip_special_tokens=False)
    assert detokenizer.append(token_ids) == "x"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@relaxed
@given(text=texts, sizes=st.lists(st.integers(0, 5), min_size=1))
def test_several_tokens_at_once(smollm: Tokenizer, text: str, sizes: list[int]) -> None:
    token_ids = smollm.encode(text)
    detokenizer = Detokenizer(smollm, [], skip_special_tokens=False)
    generated, position = "", 0
    for size in sizes:
        generated += detokenizer.append(token_ids[position : position + size])
        position += size
    generated += detokenizer.append(token_ids[position:]) + detokenizer.flush()
    assert generated == smollm.decode(token_ids)


class CountingDecoder:
    """Counts how many tokens it is asked to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.num_tokens = 0
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int], **options: bool) -> str:
        self.num_tokens += len(token_ids)
        return self._tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize("text", ["word and ", "\ufffd", "😀", "<|im_end|>"])
@pytest.mark.parametrize("skip", [False, True])
def test_cost_does_not_grow_with_length(smollm: Tokenizer, text: str, skip: bool) -> None:
    token_ids = smollm.encode(text * 1000)
    decoder = CountingDecoder(smollm)
    Detokenizer(decoder, token_ids[:50], skip_special_tokens=skip).append(token_ids)
    assert decoder.num_tokens < 30 * len(token_ids)


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Decodes as Llama 2 and Mistral do: word marks, byte tokens, one leading space dropped."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", "a", "lo"]
    backend = Backend(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )

    class Fast:
        backend_tokenizer = backend

    return Tokenizer(Fast())


def byte_tokens(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def test_sentencepiece_keeps_spaces(sentencepiece: Tokenizer) -> None:
    hello, world = 260, 261
    assert pieces_of(sentencepiece, [], [hello, world]) == ["hello", " world", ""]
    # After a prompt even the first word keeps its space.
    assert pieces_of(sentencepiece, [hello], [world, hello]) == [" world", " hello", ""]


def test_sentencepiece_bytes(sentencepiece: Tokenizer) -> None:
    token_ids = [260, *byte_tokens("😀"), *byte_tokens("é"), 262, *byte_tokens("汉😀")]
    # By how many tokens the prompt has: what is left of the text, cut characters included.
    expected = ["hello😀éa汉😀", *["😀éa汉😀"] * 4, *["éa汉😀"] * 2, "a汉😀", *["汉😀"] * 3, *["😀"] * 4]
    for cut, text in enumerate(expected):
        assert "".join(pieces_of(sentencepiece, token_ids[:cut], token_ids[cut:])) == text


def test_sentencepiece_unfinished(sentencepiece: Tokenizer) -> None:
    token_ids = [260, *byte_tokens("😀"), *byte_tokens("汉")[:2]]
    assert "".join(pieces_of(sentencepiece, [], token_ids)) == "hello😀\ufffd\ufffd"


# Whole characters, as tokens or in bytes. (Bytes that are no text are another matter: the decoder makes replacements of
# the valid ones before them, too, which a stream has given out by then.)
CHARACTERS = st.one_of(
    st.sampled_from(["😀", "👩", "\u200d", "한", "글", "汉", "é", "e", "\u0301", "🇩", "न", "\n", " "]),
    st.characters(codec="utf-8"),
).map(byte_tokens)


@settings(max_examples=2000, deadline=None)
@given(
    pieces=st.lists(st.one_of(CHARACTERS, st.sampled_from([[259], [260], [261], [262], [263]])), max_size=20),
    prompt=st.sampled_from([[], [260]]),
)
def test_sentencepiece_any_text(sentencepiece: Tokenizer, pieces: list[list[int]], prompt: list[int]) -> None:
    token_ids = [token_id for piece in pieces for token_id in piece]
    before = sentencepiece.decode(prompt)
    whole = sentencepiece.decode([*prompt, *token_ids])
    streamed = pieces_of(sentencepiece, prompt, token_ids)
    assert before + "".join(streamed) == whole
    assert not any("\ufffd" in piece for piece in streamed) or "\ufffd" in whole
