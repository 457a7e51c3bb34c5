"""The settings of EngineConfig that steer the scheduler: which choices there are, and which go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from steploop.checks import as_finite, check_bool, check_choice, checked_int
from steploop.errors import InvalidArgumentError

if TYPE_CHECKING:
    from steploop.config import EngineConfig

SCHEDULING_POLICIES = ("on_demand", "reserve", "estimate", "static")
QUEUE_ORDERS = ("fcfs", "priority", "shortest_first", "longest_prefix", "fair")
PREEMPTION_MODES = ("recompute", "swap", "auto")
PROMPT_SHARINGS = ("in_order", "equal_progress")

# A step that takes longer is no target; and the engine's microseconds must not overflow.
_MAX_STEP_DURATION_MS = 1e9
# Memory for all of them is taken at once.
_MAX_STATS_CAPACITY = 2**20


def check_scheduling(config: EngineConfig) -> None:
    """Every such field alone, then those that contradict each other.

    Raises:
        InvalidArgumentError: says what must hold and what was given.
    """
    check_choice("scheduling_policy", config.scheduling_policy, SCHEDULING_POLICIES)
    check_choice("queue_order", config.queue_order, QUEUE_ORDERS)
    check_choice("preemption_mode", config.preemption_mode, PREEMPTION_MODES)
    check_choice("prompt_sharing", config.prompt_sharing, PROMPT_SHARINGS)
    for name in ("enable_chunked_prefill", "enable_prefix_caching"):
        check_bool(name, getattr(config, name))
    for name in ("max_bypass", "long_prefill_token_threshold", "max_waiting_tokens"):
        setattr(config, name, checked_int(name, getattr(config, name), low=0))
    config.iteration_stats_capacity = checked_int(
        "iteration_stats_capacity", config.iteration_stats_capacity, low=0, high=_MAX_STATS_CAPACITY
    )
    for name in ("max_num_queued_requests", "max_num_queued_tokens"):
        if getattr(config, name) is not None:
            setattr(config, name, checked_int(name, getattr(config, name), low=1))
    watermark = as_finite(config.watermark)
    if watermark is None or not 0 <= watermark < 1:
        raise InvalidArgumentError(f"watermark must be in [0, 1), got {config.watermark!r}")
    config.watermark = watermark
    ratio = as_finite(config.waiting_served_ratio)
    if ratio is None or ratio < 0:
        raise InvalidArgumentError(f"waiting_served_ratio must be a number >= 0, got {config.waiting_served_ratio!r}")
    config.waiting_served_ratio = ratio
    if config.target_step_duration_ms is not None:
        target = as_finite(config.target_step_duration_ms)
        if target is None or not 0 < target <= _MAX_STEP_DURATION_MS:
            raise InvalidArgumentError(
                f"target_step_duration_ms must be milliseconds > 0, at most {_MAX_STEP_DURATION_MS:.0f}, got "
                f"{config.target_step_duration_ms!r}"
            )
        config.target_step_duration_ms = target
    _check_swap_space(config)
    if not config.enable_chunked_prefill:
        _check_whole_prompts(config)


def check_token_budget(config: EngineConfig, max_model_len: int) -> None:
    """Whether a step can hold the longest prompt, where prompts are not cut.

    Raises:
        InvalidArgumentError: it cannot.
    """
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise InvalidArgumentError(
            "with enable_chunked_prefill=False a step must hold the longest prompt: max_num_batched_tokens must be >= "
            f"max_model_len, got {config.max_num_batched_tokens} and {max_model_len}"
        )


def check_watermark(config: EngineConfig, num_kv_blocks: int) -> None:
    """Whether what the watermark keeps free leaves enough for a request to join another.

    Raises:
        InvalidArgumentError: it does not.
    """
    num_spare = int(config.watermark * num_kv_blocks)
    if 0 < num_spare >= num_kv_blocks - 1:
        raise InvalidArgumentError(
            f"watermark={config.watermark} keeps {num_spare} of {num_kv_blocks} KV blocks free, which leaves "
            f"{num_kv_blocks - num_spare}, too few for two requests; lower it, or enlarge the KV cache"
        )


def native_settings(config: EngineConfig) -> dict[str, Any]:
    """These fields as keyword arguments of the native engine, which has 0 for "none" and whole microseconds."""
    same = (
        "scheduling_policy",
        "watermark",
        "preemption_mode",
        "queue_order",
        "max_bypass",
        "enable_chunked_prefill",
        "long_prefill_token_threshold",
        "prompt_sharing",
        "waiting_served_ratio",
        "max_waiting_tokens",
        "enable_prefix_caching",
        "iteration_stats_capacity",
    )
    target = config.target_step_duration_ms
    return {name: getattr(config, name) for name in same} | {
        # A target below a microsecond is still one.
        "target_step_duration_us": 0 if target is None else max(1, round(target * 1000)),
        "max_num_queued_requests": config.max_num_queued_requests or 0,
        "max_num_queued_tokens": config.max_num_queued_tokens or 0,
    }


def _check_swap_space(config: EngineConfig) -> None:
    if config.swap_space_bytes is None:
        return
    config.swap_space_bytes = checked_int("swap_space_bytes", config.swap_space_bytes, low=1, high=2**63 - 1)
    if config.preemption_mode == "recompute":
        raise InvalidArgumentError(
            f"swap_space_bytes={config.swap_space_bytes} is for preemption_mode swap or auto, got recompute"
        )


def _check_whole_prompts(config: EngineConfig) -> None:
    if config.max_model_len is not None:
        check_token_budget(config, config.max_model_len)
    for name, without in (
        ("long_prefill_token_threshold", 0),
        ("prompt_sharing", "in_order"),
        ("target_step_duration_ms", None),
    ):
        if getattr(config, name) != without:
            raise InvalidArgumentError(
                f"{name}={getattr(config, name)} cuts prompts into chunks, which enable_chunked_prefill=False rules out"
            )
