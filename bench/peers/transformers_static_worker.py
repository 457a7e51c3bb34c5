"""Measures transformers' generate on static batches; started by compare.py. Needs nothing of steploop."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from worker import RunTimes, serve
from workload import Request

PADDING = 0


class TransformersStatic:
    """As many requests as there are slots, padded on the left, run until the longest of them ends; then the next."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["num_threads"])
        self._batch_size = settings["max_num_seqs"]
        dtype = getattr(torch, settings["dtype"])
        self._model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=PADDING)  # nothing ends it early

    def about(self) -> dict[str, Any]:
        """Versions and settings in force."""
        return {
            "versions": {
                "transformers": version("transformers"),
                "torch": version("torch"),
                "python": platform.python_version(),
            },
            "num_threads": torch.get_num_threads(),
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "attention": self._model.config._attn_implementation,
            "batch_size": self._batch_size,
        }

    def run(self, requests: list[Request]) -> RunTimes:
        """Serves all requests, offered at once, in batches in their order."""
        run = RunTimes()
        started = time.monotonic()
        for first in range(0, len(requests), self._batch_size):
            self._run_batch(requests[first : first + self._batch_size], run, started)
        run.duration = time.monotonic() - started
        return run

    def _run_batch(self, batch: list[Request], run: RunTimes, started: float) -> None:
        longest = max(len(request.prompt_token_ids) for request in batch)
        num_steps = max(request.num_output_tokens for request in batch)
        prompts = torch.full((len(batch), longest), PADDING)
        mask = torch.zeros((len(batch), longest), dtype=torch.long)
        for row, request in enumerate(batch):
            prompts[row, longest - len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
            mask[row, longest - len(request.prompt_token_ids) :] = 1
        clock = _Clock(started)
        with torch.inference_mode():
            tokens = self._model.generate(
                input_ids=prompts,
                attention_mask=mask,
                max_new_tokens=num_steps,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        for row, request in zip(tokens[:, longest:].tolist(), batch, strict=True):
            run.token_ids.append(row[: request.num_output_tokens])
            run.first_token_times.append(clock.times[0])
            run.last_token_times.append(clock.times[request.num_output_tokens - 1])


class _Clock(StoppingCriteria):
    """Is asked after each step, and never stops."""

    def __init__(self, started: float) -> None:
        self._started = started
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.monotonic() - self._started)
        return torch.zeros(len(input_ids), dtype=torch.bool)


if __name__ == "__main__":
    serve(TransformersStatic)
