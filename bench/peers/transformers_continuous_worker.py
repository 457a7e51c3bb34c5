"""Measures transformers' continuous batching; started by compare.py. Needs nothing of steploop."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig
from worker import RunTimes, serve
from workload import Request

PAGE_SIZE = 64
MAX_BATCH_TOKENS = 512
NEVER = -1  # no token ends a request


class TransformersContinuous:
    """Hands everything to the thread of a ContinuousBatchingManager."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["num_threads"])
        dtype = getattr(torch, settings["dtype"])
        self._model = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self._config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=settings["max_num_seqs"] * settings["max_model_len"] // PAGE_SIZE,
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_requests_per_batch=settings["max_num_seqs"],
            allow_block_sharing=False,  # or every run after the first would find its prompts computed
        )
        self._manager = self._model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=NEVER), self._config
        )
        self._manager.start()

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
            "max_requests_per_batch": self._config.max_requests_per_batch,
            "max_batch_tokens": self._config.max_batch_tokens,
        }

    def run(self, requests: list[Request]) -> RunTimes:
        """Serves all requests, offered at once."""
        run = RunTimes()
        started = time.perf_counter()  # what its timestamps are of
        names = [
            self._manager.add_request(
                request.prompt_token_ids, max_new_tokens=request.num_output_tokens, record_timestamps=True
            )
            for request in requests
        ]
        results: dict[str, Any] = {}
        while len(results) < len(names):
            result = self._manager.get_result()
            if result is None:
                raise RuntimeError("continuous batching has stopped")
            if result.error:
                raise RuntimeError(result.error)
            if result.is_finished():
                results[result.request_id] = result
        run.duration = time.perf_counter() - started
        for name in names:
            run.token_ids.append(results[name].generated_tokens)
            run.first_token_times.append(results[name].timestamps[0] - started)
            run.last_token_times.append(results[name].timestamps[-1] - started)
        return run


if __name__ == "__main__":
    serve(TransformersContinuous)
