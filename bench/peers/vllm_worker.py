"""Measures vLLM's CPU build; started by compare.py. Needs nothing of steploop."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from typing import Any

from worker import RunTimes, serve
from workload import Request

# No logging, no reports, no hub. One process, because that is fastest: on two cores a scheduler in a process of its own
# cost some 5%, and Intel's OpenMP instead of GNU's gained nothing. Idle, it uses about 0.01 cores.
DEFAULT_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}
for name, value in DEFAULT_ENVIRONMENT.items():
    os.environ.setdefault(name, value)


class Vllm:
    """Hands everything to LLM.generate, which is vLLM's own way of serving a batch offline."""

    def __init__(self, settings: dict[str, Any]) -> None:
        cpus = sorted(os.sched_getaffinity(0))[: settings["num_threads"]]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
        from vllm import LLM

        self._llm = LLM(
            settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            kv_cache_memory_bytes=settings["kv_cache_memory_bytes"],
            enable_prefix_caching=False,
            enforce_eager=False,
            disable_log_stats=False,  # or there would be no latencies
        )

    def about(self) -> dict[str, Any]:
        """Versions and settings in force."""
        import torch

        config = self._llm.llm_engine.vllm_config
        return {
            "versions": {
                "vllm-cpu": version("vllm-cpu"),
                "torch": version("torch"),
                "python": platform.python_version(),
            },
            "num_threads": torch.get_num_threads(),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "block_size": config.cache_config.block_size,
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "compilation": config.compilation_config.mode.name,
            "environment": {
                # Names of libraries, not where they lie.
                name: ":".join(part.rpartition("/")[2] for part in value.split(":"))
                for name, value in sorted(os.environ.items())
                if name.startswith(("VLLM_CPU_", "VLLM_ENABLE", "OMP_", "KMP_", "GOMP_", "LD_PRELOAD"))
            },
        }

    def run(self, requests: list[Request]) -> RunTimes:
        """Serves all requests, offered at once."""
        from vllm import SamplingParams

        run = RunTimes()
        started = time.monotonic()
        outputs = self._llm.generate(
            [{"prompt_token_ids": request.prompt_token_ids} for request in requests],
            [
                SamplingParams(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True, detokenize=False)
                for request in requests
            ],
            use_tqdm=False,
        )
        run.duration = time.monotonic() - started
        for output in outputs:
            # The engine's own times are on the same clock.
            run.first_token_times.append(output.metrics.first_token_ts - started)
            run.last_token_times.append(output.metrics.last_token_ts - started)
            run.token_ids.append(list(output.outputs[0].token_ids))
        return run


if __name__ == "__main__":
    serve(Vllm)
