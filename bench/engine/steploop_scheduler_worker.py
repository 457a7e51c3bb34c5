"""Times steploop's scheduler from Python, arrays in and arrays out; started by scheduler_cost.py."""

from __future__ import annotations

import platform
import time
from typing import Any

import numpy as np
import scheduler_load
from scheduler_load import Step
from worker import serve_lines

import steploop
from steploop._C import Scheduler, SchedulerConfig

_now = time.perf_counter_ns


class SteploopScheduler:
    """As the engine drives it, but from Python."""

    def __init__(self, num_running: int) -> None:
        config = SchedulerConfig(
            max_num_seqs=num_running,
            max_num_batched_tokens=scheduler_load.MAX_NUM_BATCHED_TOKENS,
            max_model_len=scheduler_load.MAX_MODEL_LEN,
            num_kv_blocks=num_running * scheduler_load.BLOCKS_PER_SEQUENCE,
            block_size=scheduler_load.BLOCK_SIZE,
            enable_prefix_caching=True,
        )
        self._scheduler = Scheduler(config)

    def add(self, request_id: int, prompt_token_ids: list[int], max_tokens: int) -> int:
        """See LoneScheduler."""
        started = _now()
        self._scheduler.add(request_id, prompt_token_ids, max_tokens=max_tokens)
        return _now() - started

    def step(self) -> Step:
        """See LoneScheduler."""
        started = _now()
        step_id, ids, spans = self._scheduler.schedule_arrays()
        scheduled = _now()
        sampled = ids[spans[:, 2] > 0]
        tokens = np.full(len(sampled), 100, np.int32)
        computed = _now()
        finished = self._scheduler.update_arrays(step_id, sampled, tokens)
        updated = _now()
        return Step(scheduled - started, updated - computed, len(ids), int(spans[:, 1].sum()), len(finished))

    def settle(self) -> None:
        """Nothing to do."""


class Worker:
    """Answers what scheduler_cost.py asks."""

    def about(self) -> dict[str, Any]:
        """Versions."""
        return {
            "versions": {
                "steploop": steploop.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            }
        }


if __name__ == "__main__":
    serve_lines(lambda _: Worker(), lambda _, asked: scheduler_load.measure(SteploopScheduler, **asked))
