"""Measures steploop; started by offline.py and by bench/peers/compare.py."""

from __future__ import annotations

import platform
import time
from typing import Any

from worker import RunTimes, serve
from workload import Request

import steploop
from steploop import EngineConfig, LLMEngine, SamplingParams


class Steploop:
    """Steps an LLMEngine by hand, as an application would."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._quantization = {name: settings[name] for name in ("quantization",) if name in settings}
        self._engine = LLMEngine(
            EngineConfig(
                model=settings["model"],
                dtype=settings["dtype"],
                max_model_len=settings["max_model_len"],
                max_num_seqs=settings["max_num_seqs"],
                max_num_batched_tokens=settings["max_num_batched_tokens"],
                kv_cache_memory_bytes=settings["kv_cache_memory_bytes"],
                num_threads=settings["num_threads"],
                scheduling_policy=settings["policy"],
                enable_prefix_caching=False,  # or every run after the first would find its prompts computed
                **self._quantization,
            )
        )

    def about(self) -> dict[str, Any]:
        """Versions and settings in force."""
        stats = self._engine.stats()
        return {
            "versions": {"steploop": steploop.__version__, "python": platform.python_version()},
            "dtype": self._engine.dtype,
            **self._quantization,
            "vocab_size": self._engine.vocab_size,
            "isa": stats["isa"],
            "num_threads": stats["num_threads"],
            "block_size": stats["block_size"],
        }

    def run(self, requests: list[Request]) -> RunTimes:
        """Serves all requests, offered at once."""
        engine, run = self._engine, RunTimes()
        outputs: dict[str, Any] = {}
        last_times: dict[str, float] = {}
        occupancy, tail_waste = _TimeMean(), _TimeMean()
        preemptions, steps = (engine.stats()[name] for name in ("num_preemptions", "num_steps"))
        started = time.monotonic()
        for index, request in enumerate(requests):
            params = SamplingParams(
                temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True, detokenize=False
            )
            engine.add_request(str(index), {"prompt_token_ids": request.prompt_token_ids}, params, arrival_time=started)
        while engine.has_unfinished_requests():
            step_started = time.monotonic()
            for output in engine.step():
                token_time = output.metrics.last_token_time
                if output.request_id in last_times:
                    run.inter_token_latencies.append(token_time - last_times[output.request_id])
                last_times[output.request_id] = token_time
                outputs[output.request_id] = output
            duration = time.monotonic() - step_started
            stats = engine.stats()
            occupancy.add(stats["last_step"]["num_sequences"] / engine.config.max_num_seqs, duration)
            if stats["num_used_kv_blocks"]:
                used_slots = stats["num_used_kv_blocks"] * stats["block_size"]
                tail_waste.add(1 - stats["num_kv_tokens"] / used_slots, duration)
        run.duration = time.monotonic() - started
        for index in range(len(requests)):
            output = outputs[str(index)]
            run.first_token_times.append(output.metrics.first_token_time - started)
            run.last_token_times.append(output.metrics.last_token_time - started)
            run.token_ids.append(output.outputs[0].token_ids)
        run.figures = {
            "mean_occupancy": occupancy.value,
            "kv_tail_waste": tail_waste.value,
            "num_preemptions": stats["num_preemptions"] - preemptions,
            "num_steps": stats["num_steps"] - steps,
        }
        return run


class _TimeMean:
    """A mean over time: each value counts for as long as it held."""

    def __init__(self) -> None:
        self._sum = self._duration = 0.0

    def add(self, value: float, duration: float) -> None:
        self._sum += value * duration
        self._duration += duration

    @property
    def value(self) -> float:
        return self._sum / self._duration if self._duration else 0.0


if __name__ == "__main__":
    serve(Steploop)
