"""Measures an engine for roofline.py: whole decode steps, the operations in them, how both grow with context."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from roofline_model import ENGINE_SETTINGS, Line, fit_line

from steploop import EngineConfig, LLMEngine, SamplingParams

SEED = 20261129
NUM_WARM_UP_STEPS = 4
MAX_OUTPUT_TOKENS = 48
"""Of a sequence in a batch: so many steps fit in, with those that warm up and those that wait for others' prompts."""
CHUNK_TOKENS = 512
"""Most tokens of one prompt in a step: what the cost of prompts is measured in."""
BLOCK_SIZE = 16
NUM_SPARE_TOKENS = NUM_WARM_UP_STEPS + 2
"""Of a sequence beside its prompt and its steps: the first token, those that warm up, one that would be its last."""
PHASES = ("schedule_us", "build_us", "forward_us", "sample_us", "update_us")


class Steps:
    """An engine that decodes fixed batches, again and again the same."""

    def __init__(
        self,
        model: str,
        weight_format: str,
        num_threads: int | None,
        *,
        batch: int,
        num_prompt_tokens: int,
        context: int,
        profile: bool = False,
    ) -> None:
        """`batch`: the most sequences at a time; `num_prompt_tokens`: of each, in batches; `context`: the longest
        sequence of all.
        """
        in_batch = batch * -(-(num_prompt_tokens + MAX_OUTPUT_TOKENS) // BLOCK_SIZE)
        alone = -(-context // BLOCK_SIZE) + 1
        self._engine = LLMEngine(
            EngineConfig(
                model=model,
                max_model_len=context,
                max_num_seqs=batch,
                num_kv_blocks=max(in_batch, alone),
                block_size=BLOCK_SIZE,
                num_threads=num_threads,
                long_prefill_token_threshold=CHUNK_TOKENS,
                iteration_stats_capacity=4096,
                profile=profile,
                **ENGINE_SETTINGS[weight_format],
            )
        )
        self.kv_format = self._engine.dtype
        # The system gives memory when it is touched first, and that takes longer than what is measured here.
        self.decode(batch, num_prompt_tokens, MAX_OUTPUT_TOKENS // 2)

    @property
    def stats(self) -> dict[str, Any]:
        """The engine's."""
        return self._engine.stats()

    def decode(self, batch: int, num_prompt_tokens: int, num_steps: int) -> Line:
        """Steps in which `batch` sequences decode.

        Returns:
            "batch", "context" (mean tokens in the cache of a sequence) and "seconds" (of each step, with the Python
            around it).
        """
        seconds, contexts = [], []
        with self._decoding(batch, num_prompt_tokens):
            for _ in range(num_steps):
                contexts.append(self._engine.stats()["num_kv_tokens"] / batch)
                began = time.perf_counter()
                self._engine.step()
                seconds.append(time.perf_counter() - began)
        return {"batch": batch, "context": sum(contexts) / len(contexts), "seconds": seconds}

    def profile(self, batch: int, num_prompt_tokens: int, num_steps: int) -> Line:
        """The same steps, seen from inside; all times in microseconds per step.

        Returns:
            "batch"; "step_us"; "operations": by name "num_calls" and "num_barriers" per step, and "working_us" and
            "waiting_us" (at barriers), means over the threads; "fork_join_us": until all threads have started and
            ended; "schedule_us", "build_us", "update_us", "python_us" and "other_us": the parts that one thread does
            alone. Operations, "fork_join_us" and these parts make up the step.
        """
        with self._decoding(batch, num_prompt_tokens):
            self._engine.profile()
            self._engine.iteration_stats()
            began = time.perf_counter()
            for _ in range(num_steps):
                self._engine.step()
            step_us = (time.perf_counter() - began) * 1e6
            profile, iterations = self._engine.profile(), self._engine.iteration_stats()
        totals = {phase: float(sum(iteration[phase] for iteration in iterations)) for phase in PHASES}
        latency_us = sum(iteration["iteration_latency_ms"] for iteration in iterations) * 1e3
        return summarise_profile(profile, totals, latency_us, step_us) | {"batch": batch}

    def by_context(self, contexts: list[int], num_steps: int, num_rounds: int) -> Line:
        """How steps grow with the tokens in the cache, medians over the rounds.

        Returns:
            "decode": (tokens in the cache, seconds of a step of one sequence), a pair for each of `contexts`; "prompt":
            (mean tokens in the cache, seconds) of each chunk of CHUNK_TOKENS of the longest one; and of each "..._fit",
            the straight line through them.
        """
        by_tokens: dict[str, dict[float, list[float]]] = {"decode": {}, "prompt": {}}
        for _ in range(num_rounds):
            for tokens, seconds in self._prompt_chunks(max(contexts)):
                by_tokens["prompt"].setdefault(tokens, []).append(seconds)
            for context in contexts:
                figures = self.decode(1, context, num_steps)
                by_tokens["decode"].setdefault(figures["context"], []).extend(figures["seconds"])
        points = {
            kind: [(tokens, median(seconds)) for tokens, seconds in of_kind.items()]
            for kind, of_kind in by_tokens.items()
        }
        return {
            **points,
            **{f"{kind}_fit": vars(fit_line(of_kind)) for kind, of_kind in points.items() if len(of_kind) > 1},
        }

    def _prompt_chunks(self, num_prompt_tokens: int) -> list[tuple[float, float]]:
        """(Mean tokens in the cache, seconds) of each whole chunk of a prompt, which stays in the prefix cache."""
        self._engine.reset_prefix_cache()
        self._engine.iteration_stats()
        with self._decoding(1, num_prompt_tokens):
            chunks = [i for i in self._engine.iteration_stats() if i["num_context_tokens"] == CHUNK_TOKENS]
        return [
            ((index + 0.5) * CHUNK_TOKENS, chunk["iteration_latency_ms"] * 1e-3) for index, chunk in enumerate(chunks)
        ]

    def close(self) -> None:
        """Frees the engine's memory."""
        self._engine.close()

    @contextmanager
    def _decoding(self, batch: int, num_prompt_tokens: int) -> Iterator[None]:
        """While inside, steps decode the whole batch and nothing else; the prompts stay in the prefix cache."""
        engine = self._engine
        generator = random.Random(SEED)
        params = SamplingParams(temperature=0, max_tokens=MAX_OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
        prompts = [[generator.randrange(engine.vocab_size) for _ in range(num_prompt_tokens)] for _ in range(batch)]
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        while engine.stats()["last_step"]["num_decode_tokens"] < batch:
            self._check_all_run(batch)
            engine.step()
        for _ in range(NUM_WARM_UP_STEPS - 1):
            engine.step()
        try:
            yield
            self._check_all_run(batch)
        finally:
            engine.abort_request(engine.unfinished_request_ids())
            engine.drain()

    def _check_all_run(self, batch: int) -> None:
        if (num_running := len(self._engine.unfinished_request_ids())) < batch:
            raise RuntimeError(f"{batch - num_running} of {batch} sequences ended too early: ask for fewer steps")


def summarise_profile(
    profile: dict[str, Any], phases_us: dict[str, float], latency_us: float, wall_us: float
) -> dict[str, Any]:
    """What `Steps.profile` returns, out of an engine's profile and its statistics over the same steps."""
    num_steps = profile["num_runs"]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) / num_steps

    operations = {
        name: {
            "num_calls": times["num_calls"] / num_steps,
            "num_barriers": times["num_barriers"] / num_steps,
            "working_us": mean(times["working_us"]),
            "waiting_us": mean(times["waiting_us"]),
        }
        for name, times in profile["operations"].items()
        if times["num_calls"]
    }
    run_us = profile["run_us"] / num_steps
    in_operations = sum(times["working_us"] + times["waiting_us"] for times in operations.values())
    alone = {phase: phases_us[phase] / num_steps for phase in ("schedule_us", "build_us", "update_us")}
    latency_us, wall_us = latency_us / num_steps, wall_us / num_steps
    return {
        "step_us": wall_us,
        "operations": operations,
        "fork_join_us": run_us - in_operations,
        **alone,
        "python_us": wall_us - latency_us,
        "other_us": latency_us - run_us - sum(alone.values()),
    }
