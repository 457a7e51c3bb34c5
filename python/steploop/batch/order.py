"""The order in which a batch's lines start."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ORDERS = ("grouped", "input", "longest", "prefix")

_LEVELS = (0, 16, 32, 48)  # bits of a prefix key below those that a group has in common; the smallest groups first
_MAX_ROUNDS = 32

Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]


def order_lines(order: str, expected: Ints, prefix: Keys, work: Ints, num_slots: int) -> Ints:
    """Indices of lines, the first to start first.

    Lines that begin with the same text should start one after the other, while the prefix cache has it ("prefix"). A
    long answer that starts late runs on alone when all others have ended, so the longest should start first
    ("longest"). "grouped" does both: of groups of lines that begin alike, those with the longest answers come first, of
    the lines of a group the longest; and what would still run on at the end, for longer than the mean answer takes,
    comes before all groups. In a large job that is nothing.

    Args:
        expected: Tokens of each answer.
        prefix: As `prefix_key`.
        work: Of each line, in tokens of answers: what it takes of a slot's time.
        num_slots: How many sequences run at a time.
    """
    if order == "input":
        return np.arange(len(expected))
    if order == "longest":
        return np.argsort(-expected, kind="stable")
    if order == "prefix":
        return np.lexsort((-expected, prefix))
    return _bring_forward(_by_group(expected, prefix), expected, work, num_slots)


def _by_group(expected: Ints, prefix: Keys) -> Ints:
    """Groups, and the groups within them, by their longest lines."""
    keys = [-expected]
    for num_bits in _LEVELS:
        groups, members = np.unique(prefix >> np.uint64(num_bits), return_inverse=True)
        longest = np.zeros(len(groups), np.int64)
        np.maximum.at(longest, members, expected)
        keys += [members, -longest[members]]
    return np.lexsort(keys)  # by the last key first


def _bring_forward(lines: Ints, expected: Ints, work: Ints, num_slots: int) -> Ints:
    """Puts lines that would end late before all others."""
    if len(lines) == 0:
        return lines
    end = work.sum() / num_slots + expected.mean()
    is_early = np.zeros(len(lines), bool)
    ordered = lines
    for _ in range(_MAX_ROUNDS):
        starts = (np.cumsum(work[ordered]) - work[ordered]) / num_slots
        late = ordered[(starts + expected[ordered] > end) & ~is_early[ordered]]
        if len(late) == 0:
            break
        # Others are the last ones now, and may be late as well.
        is_early[late] = True
        early = lines[is_early[lines]]
        ordered = np.concatenate([early[np.argsort(-expected[early], kind="stable")], lines[~is_early[lines]]])
    return ordered
