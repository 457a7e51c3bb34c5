"""How much of a workload's prompts has been there before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from steploop.workload.columns import Workload


def share_of_known_tokens(workload: Workload) -> float:
    """The share of all prompt tokens that stand, with the same content before them in their segment, in the prompt of
    an earlier request of the tenant's or in its answer: what a prefix cache that forgets nothing could have of them,
    where no answer is late."""
    segments = workload.segments
    if segments is None:
        return 0.0
    # How far each segment's content is known after its request.
    reach = segments.lengths.astype(np.int64)
    reach[segments.last] += workload.num_output_tokens
    contents = segments.contents
    if workload.tenants is not None:  # they share no cache
        contents = contents + np.repeat(workload.tenants, np.diff(segments.offsets)) * np.int64(workload.num_contents)
    order = np.argsort(contents, kind="stable")
    contents = contents[order]
    rank = np.cumsum(np.diff(contents, prepend=contents[:1]) != 0)
    # The largest so far within each content: contents lie so far apart that none reaches into the next.
    apart = rank << 32
    furthest = np.maximum.accumulate(apart + reach[order]) - apart
    before = np.concatenate(([0], furthest[:-1]))
    before[np.diff(rank, prepend=-1) != 0] = 0
    return float(np.minimum(segments.lengths[order], before).sum() / segments.lengths.sum(dtype=np.int64))
