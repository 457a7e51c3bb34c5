"""EngineTarget: an AsyncLLMEngine in this process."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

from steploop.async_engine import AsyncLLMEngine
from steploop.errors import SteploopError
from steploop.loadtest.record import Arrival, RequestFailure, RequestRecord
from steploop.loadtest.target import TargetDescription, TargetFigures
from steploop.sampling_params import SamplingParams

STATS_CAPACITY = 2**14
"""For EngineConfig.iteration_stats_capacity, so that steps of a tenth of a millisecond are not forgotten either."""

_COLLECT_EVERY = 0.25  # seconds: in small portions, since nothing else runs here while one is fetched


class EngineTarget:
    """Sends requests to an engine, which is closed with it."""

    def __init__(self, engine: AsyncLLMEngine, *, temperature: float = 0.0) -> None:
        self._engine = engine
        self._temperature = temperature
        self._iterations: list[dict[str, Any]] = []
        self._num_steps_before = 0
        self._collector: asyncio.Task[None] | None = None

    def describe(self) -> TargetDescription:
        """The model, and the settings in force."""
        engine = self._engine.engine
        about = {
            "dtype": engine.dtype,
            "quantization": engine.quantization,
            "max_model_len": engine.max_model_len,
            "max_num_seqs": engine.config.max_num_seqs,
            "max_num_batched_tokens": engine.config.max_num_batched_tokens,
            "scheduling_policy": engine.config.scheduling_policy,
        }
        return TargetDescription(str(engine.config.model), engine.vocab_size, about)

    def prepare(
        self, prompt: str | list[int], num_output_tokens: int, **options: Any
    ) -> tuple[Any, SamplingParams, dict[str, Any]]:
        """See Target."""
        params = SamplingParams(temperature=self._temperature, max_tokens=num_output_tokens, ignore_eos=True)
        return prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}, params, options

    async def send(self, prepared: tuple[Any, SamplingParams, dict[str, Any]], record: RequestRecord) -> None:
        """See Target."""
        prompt, params, options = prepared
        num_tokens = 0
        output = None
        try:
            async with aclosing(self._engine.generate(prompt, params, **options)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    num_new = len(output.outputs[0].token_ids) - num_tokens
                    if num_new:
                        record.arrivals.append(Arrival(time.monotonic(), num_new))
                        num_tokens += num_new
        except SteploopError as error:
            raise RequestFailure(type(error).__name__, str(error)) from error
        assert output is not None
        reason = output.outputs[0].finish_reason
        if reason not in ("length", "stop"):
            raise RequestFailure(f"finish_reason_{reason}", "the engine ended the request")
        record.num_prompt_tokens = len(output.prompt_token_ids)
        record.num_output_tokens = num_tokens
        record.num_cached_tokens = output.num_cached_tokens
        record.queue_time = output.metrics.time_in_queue

    async def begin(self) -> None:
        """See Target."""
        self._engine.engine.iteration_stats()
        self._iterations = []
        self._num_steps_before = self._engine.engine.stats()["num_steps"]
        self._collector = asyncio.create_task(self._collect())

    async def end(self) -> TargetFigures:
        """See Target."""
        assert self._collector is not None
        self._collector.cancel()
        num_steps = self._engine.engine.stats()["num_steps"] - self._num_steps_before
        self._iterations += self._engine.engine.iteration_stats()
        return TargetFigures(
            queue_time_source="RequestOutput.metrics",
            iterations=self._iterations,
            num_iterations_lost=max(0, num_steps - len(self._iterations)),
        )

    async def close(self) -> None:
        """See Target."""
        await asyncio.to_thread(self._engine.close)

    async def _collect(self) -> None:
        while True:
            await asyncio.sleep(_COLLECT_EVERY)
            self._iterations += self._engine.engine.iteration_stats()
