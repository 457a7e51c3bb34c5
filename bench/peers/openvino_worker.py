"""Measures OpenVINO GenAI's continuous batching; started by compare.py. Needs nothing of steploop."""

from __future__ import annotations

import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from worker import RunTimes, serve
from workload import Request

# Prompts in chunks of this size beside decodes were faster than with a budget of 2048 tokens.
MAX_NUM_BATCHED_TOKENS = 512


class OpenVino:
    """Steps a ContinuousBatchingPipeline by hand, as its own benchmark does."""

    def __init__(self, settings: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = settings["max_num_seqs"]
        scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        scheduler.cache_size = -(-settings["kv_cache_memory_bytes"] // 2**30)  # GiB
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_NUM_THREADS": settings["num_threads"],
            "INFERENCE_PRECISION_HINT": settings["precision"],
        }
        self._settings = settings
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
        self._num_requests = 0

    def about(self) -> dict[str, Any]:
        """Versions and settings in force."""
        return {
            "versions": {
                "openvino-genai": version("openvino-genai"),
                "openvino": version("openvino"),
                "python": platform.python_version(),
            },
            "num_threads": self._settings["num_threads"],
            "dtype": f"{Path(self._settings['model']).name}, computed in {self._settings['precision']}",
            "max_num_seqs": self._settings["max_num_seqs"],
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
        }

    def run(self, requests: list[Request]) -> RunTimes:
        """Serves all requests, offered at once."""
        run = RunTimes()
        run.token_ids = [[] for _ in requests]
        times: list[list[float]] = [[] for _ in requests]
        started = time.monotonic()
        handles = {index: self._add(request) for index, request in enumerate(requests)}
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.monotonic() - started
            for index, handle in list(handles.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        run.token_ids[index] += output.generated_ids
                        times[index] += [now] * len(output.generated_ids)
                if len(times[index]) >= requests[index].num_output_tokens:
                    del handles[index]
        run.duration = time.monotonic() - started
        run.first_token_times = [of_request[0] for of_request in times]
        run.last_token_times = [of_request[-1] for of_request in times]
        return run

    def _add(self, request: Request) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = request.num_output_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._num_requests += 1
        prompt = openvino.Tensor(np.array([request.prompt_token_ids], dtype=np.int64))
        return self._pipeline.add_request(self._num_requests, prompt, config)


if __name__ == "__main__":
    serve(OpenVino)
