"""FasterTransformer's batches, as the Orca paper (section 6.2) describes them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from steploop import _C
from steploop.simulation import Deployment
from steploop.workload import Workload

FloatArray = npt.NDArray[np.float64]


def serve_request_level(workload: Workload, deployment: Deployment, max_batch_size: int) -> FloatArray:
    """[num_requests] When each answer is returned, in seconds: that is when the last of its batch is done.

    A batch is what waits when the one before has ended, `max_batch_size` at most. Its first step computes of every
    prompt as many tokens as the shortest has; the rest of the longer ones goes token by token beside the others'
    outputs. Rows that have ended stay to the end of the batch.
    """
    cost = _C.CostModel(deployment.cost_fields(16))
    arrivals, prompts = workload.arrival_times, workload.num_prompt_tokens
    lengths = prompts + workload.num_output_tokens
    returned = np.empty(len(workload))
    now, first = 0.0, 0
    while first < len(workload):
        now = max(now, float(arrivals[first]))
        last = min(int(np.searchsorted(arrivals, now, side="right")), first + max_batch_size)
        now += batch_seconds(cost, prompts[first:last], lengths[first:last])
        returned[first:last] = now
        first = last
    return returned


def batch_seconds(cost: _C.CostModel, prompts: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> float:
    """How long a batch takes; `lengths`: of prompt and output."""
    count, shortest = len(prompts), int(prompts.min())
    seconds = cost.duration_us(
        num_tokens=count * shortest,
        num_sequences=count,
        num_sample_rows=count,
        num_prompt_pairs=count * shortest * (shortest + 1) // 2,
    )
    # A step's duration grows in a straight line with the keys, so that the middle one stands for all. The last token
    # that is sampled is never computed.
    num_steps = int(lengths.max()) - 1 - shortest
    mean_keys = shortest + (num_steps + 1) / 2
    seconds += num_steps * cost.duration_us(
        num_tokens=count, num_sequences=count, num_sample_rows=count, num_decode_keys=round(count * mean_keys)
    )
    return seconds / 1e6
