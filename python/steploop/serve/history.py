"""History: what the engine did in each of the last seconds, for the status page."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from steploop.engine import LLMEngine

_SECONDS = 300


@dataclass
class _Second:
    time: int
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_steps: int = 0
    step_ms: float = 0.0
    max_step_ms: float = 0.0
    latest: dict[str, Any] = field(default_factory=dict)


class History:
    """Sums of an engine's iterations, by the second in which they began. It takes `iteration_stats` for itself."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._seconds: deque[_Second] = deque(maxlen=_SECONDS)

    def update(self) -> None:
        """Takes in the iterations since the last call."""
        with self._lock:
            for iteration in self._engine.iteration_stats():
                self._take(iteration)

    def as_dict(self) -> dict[str, Any]:
        """The last minutes, a list for each measure; seconds without a step are left out.

        `seconds` are negative, 0 being now. Inter-token latency is how long a step took in which requests decoded.
        """
        self.update()
        now = time.monotonic()
        with self._lock:
            recent = [second for second in self._seconds if now - second.time <= _SECONDS]
            return {
                "seconds": [second.time - int(now) for second in recent],
                "prompt_tokens": [second.num_prompt_tokens for second in recent],
                "generation_tokens": [second.num_generation_tokens for second in recent],
                "inter_token_latency_ms": [
                    second.step_ms / second.num_steps if second.num_steps else None for second in recent
                ],
                "max_inter_token_latency_ms": [second.max_step_ms if second.num_steps else None for second in recent],
                "running": [second.latest["num_active_requests"] for second in recent],
                "queued": [second.latest["num_queued_requests"] for second in recent],
                "kv_cache_usage": [
                    second.latest["used_num_blocks"] / second.latest["max_num_blocks"] for second in recent
                ],
            }

    def _take(self, iteration: dict[str, Any]) -> None:
        began = int(iteration["timestamp"])
        if not self._seconds or self._seconds[-1].time != began:
            self._seconds.append(_Second(began))
        second = self._seconds[-1]
        second.num_prompt_tokens += iteration["num_context_tokens"]
        second.num_generation_tokens += iteration["num_generation_tokens"]
        if iteration["num_generation_requests"]:
            second.num_steps += 1
            second.step_ms += iteration["iteration_latency_ms"]
            second.max_step_ms = max(second.max_step_ms, iteration["iteration_latency_ms"])
        second.latest = iteration
