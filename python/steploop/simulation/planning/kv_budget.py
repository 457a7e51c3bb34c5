"""KV budget: the smallest KV cache with which a layout still meets the objective."""

from __future__ import annotations

from dataclasses import dataclass

from steploop.simulation.planning.trials import Trial, Trials
from steploop.simulation.simulation import longest_sequence

PRECISION = 0.02


@dataclass(frozen=True, kw_only=True)
class KvBudget:
    """A KV cache, of each device."""

    num_kv_blocks: int
    memory_bytes: int
    """What to give as kv_cache_memory_bytes."""
    available_bytes: int
    """What the layout has."""
    trial: Trial


def smallest_kv_cache(trials: Trials, good: Trial) -> KvBudget:
    """By bisection, to within PRECISION of it: a larger cache is taken to be better. It holds a sequence of
    max_model_len at least, as it must.

    Args:
        good: A trial with all of the memory.
    """
    settings = trials.settings_of(good.layout, good.limits)
    block_size, deployment = settings.engine.block_size, settings.deployment
    most = good.num_kv_blocks
    least = -(-longest_sequence(deployment, settings.engine) // block_size)
    best = good
    attempt = trials.run(good.layout, good.limits, good.rate, least)
    if attempt.good:
        best, most = attempt, least
    while most - least > max(1, PRECISION * least):
        middle = (least + most) // 2
        attempt = trials.run(good.layout, good.limits, good.rate, middle)
        if attempt.good:
            best, most = attempt, middle
        else:
            least = middle
    block_bytes = block_size * deployment.kv_bytes_per_token
    return KvBudget(
        num_kv_blocks=best.num_kv_blocks,
        memory_bytes=best.num_kv_blocks * block_bytes,
        available_bytes=good.num_kv_blocks * block_bytes,
        trial=best,
    )
