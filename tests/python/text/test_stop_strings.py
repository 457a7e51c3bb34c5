"""StopStrings: a match is found wherever the text is cut, and nothing of it gets out before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steploop.stop_strings import StopStrings


def feed(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """What was given out after each piece and in the end, and the match."""
    finder = StopStrings(stops, include=include)
    given_out = [finder.push(piece) for piece in pieces]
    return [*given_out, finder.flush()], finder.matched


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(begin, end) of the first match to be complete, the longest of those that end there."""
    for end in range(len(text) + 1):
        for begin in range(end + 1):
            if text[begin:end] in stops:
                return begin, end
    return None


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["a", "stop", "</s>", "aab", "\n\n", "끝.", "👩‍👩‍👧"])
def test_at_every_offset_across_pieces(stop: str, include: bool) -> None:
    text = "one aa " + stop + " two"
    for first in range(len(text)):
        for second in range(first, len(text)):
            pieces = [text[:first], text[first:second], text[second:]]
            given_out, matched = feed(pieces, [stop], include=include)
            begin = text.index(stop)
            assert matched == stop
            assert "".join(given_out) == text[: begin + (len(stop) if include else 0)]


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_the_cuts_do_not_matter(pieces: list[str], stops: list[str], include: bool) -> None:
    text = "".join(pieces)
    given_out, matched = feed(pieces, stops, include=include)
    match = first_match(text, stops)
    if match is None:
        assert matched is None
        assert "".join(given_out) == text
    else:
        assert matched == text[slice(*match)]
        assert "".join(given_out) == text[: match[1] if include else match[0]]


@given(pieces=st.lists(st.text("ab", max_size=3), max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=5)))
@settings(max_examples=300, deadline=None)
def test_no_part_of_a_match_gets_out_and_no_more_is_held(pieces: list[str], stops: list[str]) -> None:
    finder = StopStrings(stops, include=False)
    text = given_out = ""
    for piece in pieces:
        text += piece
        given_out += finder.push(piece)
        if finder.matched is not None:
            return
        held = text[len(given_out) :]
        assert text == given_out + held
        assert not held or any(stop.startswith(held) for stop in stops)
        assert not any(text.endswith(stop[:length]) for stop in stops for length in range(len(held) + 1, len(stop)))


def test_nothing_comes_after_a_match() -> None:
    finder = StopStrings(["x"], include=False)
    assert finder.push("axb") == "a"
    assert (finder.push("c"), finder.flush()) == ("", "")
