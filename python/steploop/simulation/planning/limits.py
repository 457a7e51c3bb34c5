"""Limits: the max_num_seqs and max_num_batched_tokens that bear the most load, and how much that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from steploop.scheduling import check_token_budget
from steploop.simulation.planning.trials import Limits, Trial, Trials
from steploop.simulation.simulation import longest_sequence

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = "max_num_seqs", "max_num_batched_tokens"
SEARCHED = (MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
PRECISION = 0.02
"""Of the largest rate; and by how much other limits must better it."""
MOST_TIMES = 1024
"""So many times the planned rate at most are looked for."""

# First values, in the order in which they are tried, and how far the search may go from there.
_SEQUENCES, _SEQUENCES_RANGE = (256, 1024, 64), (8, 4096)
_TOKENS, _TOKENS_RANGE = (2048, 512, 1024, 256, 8192), (64, 32768)


@dataclass(frozen=True, kw_only=True)
class LoadLimit:
    """How much load limits bear, to within PRECISION."""

    limits: Limits
    rate: float
    """The largest that was found to be good."""
    failing_rate: float | None
    """The smallest above it that was found not to be; None: there is none up to MOST_TIMES that of the plan."""


class LimitGrid:
    """Which limits may be tried.

    Args:
        keep: Those of SEARCHED that stay as the settings have them.

    Raises:
        InvalidArgumentError: prompts must be whole, and the token budget that stays does not hold the longest; or a
            max_model_len that the model does not have.
    """

    def __init__(self, trials: Trials, keep: frozenset[str]) -> None:
        engine = trials.settings.engine
        longest = longest_sequence(trials.settings.deployment, engine)
        self._keep = keep
        self._engine = engine
        self._least_tokens = _TOKENS_RANGE[0]
        if not engine.enable_chunked_prefill:
            self._least_tokens = 1 << (longest - 1).bit_length()
        if MAX_NUM_BATCHED_TOKENS in keep:
            check_token_budget(engine, longest)

    def first(self) -> list[Limits]:
        """What layouts are tried with."""
        sequences, tokens = list(_SEQUENCES), [count for count in _TOKENS if count >= self._least_tokens]
        if MAX_NUM_SEQS in self._keep:
            sequences = [self._engine.max_num_seqs]
        if MAX_NUM_BATCHED_TOKENS in self._keep:
            tokens = [self._engine.max_num_batched_tokens]
        pairs = [
            Limits(max_num_seqs=seqs, max_num_batched_tokens=count)
            for seqs in sequences
            for count in tokens or [self._least_tokens]
        ]
        # A step never has more sequences than tokens.
        return [pair for pair in pairs if pair.max_num_seqs <= pair.max_num_batched_tokens] or pairs[:1]

    def widest(self) -> Limits:
        """Best for a request that has the devices to itself."""
        return max(self.first(), key=lambda limits: limits.max_num_batched_tokens)

    def neighbours(self, limits: Limits) -> Iterator[Limits]:
        """The same, half and double of each."""
        tokens_range = (self._least_tokens, max(self._least_tokens, _TOKENS_RANGE[1]))
        for tokens in self._around(MAX_NUM_BATCHED_TOKENS, limits.max_num_batched_tokens, tokens_range):
            for seqs in self._around(MAX_NUM_SEQS, limits.max_num_seqs, _SEQUENCES_RANGE):
                other = Limits(max_num_seqs=seqs, max_num_batched_tokens=tokens)
                if other != limits and seqs <= tokens:
                    yield other

    def _around(self, name: str, value: int, span: tuple[int, int]) -> list[int]:
        if name in self._keep:
            return [value]
        return [value, *(other for other in (value // 2, value * 2) if span[0] <= other <= span[1])]


def best_limits(trials: Trials, good: Trial, grid: LimitGrid) -> list[LoadLimit]:
    """From limits that are good to neighbours that bear more load, until none does; the best comes last.

    A neighbour counts if it is good at a rate that is larger by PRECISION, and its own largest rate is looked for only
    then.
    """
    most = MOST_TIMES * good.rate
    steps = [largest_rate(trials, good, good.rate, most)]
    tried = {good.limits}
    while (better := _better_neighbour(trials, good, grid, steps[-1], tried)) is not None:
        steps.append(largest_rate(trials, better, better.rate, most))
    return steps


def largest_rate(trials: Trials, good: Trial, rate: float, most: float) -> LoadLimit:
    """Doubles a rate at which a layout is good until it is not, or beyond `most`; then bisects."""

    def is_good(rate: float) -> bool:
        return trials.run(good.layout, good.limits, rate).good

    failing = 2 * rate
    while is_good(failing):
        rate, failing = failing, 2 * failing
        if failing > most:
            return LoadLimit(limits=good.limits, rate=rate, failing_rate=None)
    while failing > rate * (1 + PRECISION):
        middle = (rate + failing) / 2
        if is_good(middle):
            rate = middle
        else:
            failing = middle
    return LoadLimit(limits=good.limits, rate=rate, failing_rate=failing)


def _better_neighbour(
    trials: Trials, good: Trial, grid: LimitGrid, best: LoadLimit, tried: set[Limits]
) -> Trial | None:
    if best.failing_rate is None:
        return None
    for limits in grid.neighbours(best.limits):
        if limits not in tried:
            tried.add(limits)
            trial = trials.run(good.layout, limits, best.rate * (1 + PRECISION))
            if trial.good:
                return trial
    return None
