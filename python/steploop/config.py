"""EngineConfig: every setting of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from steploop.checks import as_finite, check_bool, check_choice, checked_int
from steploop.errors import InvalidArgumentError
from steploop.scheduling import check_scheduling

BLOCK_SIZES = (8, 16, 32, 64)
QUANTIZATIONS = ("int8", "int4")


@dataclass(kw_only=True)
class EngineConfig:
    """Settings of an `LLMEngine`, named as in vLLM.

    Raises:
        InvalidArgumentError: a value of the wrong type or range. What depends on the model is checked by the engine.
    """

    model: str | Path
    """A model folder (Hugging Face's, or one that `steploop pack` wrote), a GGUF file, or a name on the hub."""
    tokenizer: str | Path | None = None
    """A folder, a GGUF file or a hub name to take the tokenizer from instead of the model."""
    revision: str | None = None
    """The model's branch, tag or commit on the hub."""
    dtype: str = "auto"
    """Compute type. On the CPU "float32" (exact), "bfloat16", or "auto": float32 for a folder of float32 weights, else
    bfloat16 (a GGUF file always), and what a packed model is packed in, which can be in no other. On CUDA "bfloat16"
    ("auto" too) or "float16"."""
    quantization: str | None = None
    """How linear weights are stored, on the CPU: "int8" or "int4", made as the model is loaded, with inputs in 8 bits
    (see `steploop.weights.recipe`). None: not quantised; a packed model: as it is."""
    kv_cache_dtype: str = "auto"
    """Type of the KV cache. "auto": the compute type, and on CUDA always that. On the CPU also "float32", "bfloat16" or
    "int8": a scale for each token's key and value of each head, in little more than half of bfloat16's memory."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output together, in tokens. Default: the model's own limit; if the default KV cache
    cannot hold one such sequence, what it can hold (a warning says so)."""
    max_num_seqs: int = 64
    """Most sequences in one step."""
    max_num_batched_tokens: int = 2048
    """Most tokens in one step, those of decoding sequences and of prompt chunks together."""
    block_size: int = 16
    """Tokens in a KV block: 8, 16, 32 or 64."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache in bytes. Default: enough for `max_num_seqs` sequences of `max_model_len`, but at most a
    quarter of the memory that will be available once the weights are loaded (the cgroup's where that is less); on CUDA
    what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = 0.9
    """On CUDA, the share of the device's memory, in (0, 1], that weights, activations, KV cache and whatever else is on
    the device may take together. A size given for the KV cache goes before it."""
    num_kv_blocks: int | None = None
    """Size of the KV cache in blocks; instead of `kv_cache_memory_bytes`."""
    num_threads: int | None = None
    """Threads of a step. Default: the physical cores this process may use."""
    seed: int = 0
    """Requests without a seed of their own draw theirs from it."""
    device: str = "cpu"
    """"cpu" or "cuda" (the first device that CUDA_VISIBLE_DEVICES leaves)."""
    batch_invariant: bool = True
    """Whether a request's tokens are the same bits whatever else is in the batch. False, on CUDA only: linear layers
    run in cuBLAS, which may be faster and chooses its order of summation by the size of the batch."""
    scheduling_policy: str = "on_demand"
    """Who may start, and who gives way when KV blocks run out. "on_demand": blocks are taken as sequences grow; when
    there are none left, the last in line gives its own back. "reserve": a request starts once the blocks to its
    longest possible end are free, so nobody ever gives way. "estimate": like that for a share of `max_tokens`, learnt
    as requests end; the one with the fewest outputs gives way. "static": a batch runs until its last request ends, the
    baseline to compare with."""
    watermark: float = 0.0
    """Share of the KV blocks, in [0, 1), that "on_demand" and "estimate" keep free when a request joins others."""
    preemption_mode: str = "recompute"
    """What becomes of the KV blocks of a sequence that gives way. "recompute": freed, and computed again later. "swap":
    copied to host memory and back, as far as that holds them. "auto": whichever takes less time."""
    swap_space_bytes: int | None = None
    """Host memory for "swap" and "auto". Default: as many blocks as the KV cache has."""
    queue_order: str = "fcfs"
    """Who starts next. "fcfs": by arrival. "priority": by the requests' `priority`, the lower first; under "on_demand"
    and "estimate" it also preempts. "shortest_first": the shortest prompt. "longest_prefix": the one with the most
    tokens in the prefix cache. "fair": the requests' `tenant`s in turn, counted in tokens."""
    max_bypass: int = 8
    """So often at most is the request that has waited longest overtaken by others of its priority; >= 0."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be spread over several steps, beside decodes. False: whole prompts, in steps of their own;
    `max_num_batched_tokens` must hold the longest."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step; 0: no limit."""
    prompt_sharing: str = "in_order"
    """What decodes leave of a step's tokens goes to prompts "in_order", each as much as it can use, or in
    "equal_progress", each the same."""
    waiting_served_ratio: float = 0.3
    """Without chunked prefill: prompts interrupt decodes when at least this share of the running requests waits, ..."""
    max_waiting_tokens: int = 20
    """... or after so many steps of decodes."""
    target_step_duration_ms: float | None = None
    """How long a step may take, by the durations measured so far: prompts get only what decodes leave of it."""
    enable_prefix_caching: bool = True
    """Whether KV blocks are kept after their requests have ended, for prompts that begin with the same tokens."""
    max_num_queued_requests: int | None = None
    """Most requests that have not started; one more is refused with `QueueFullError`. Default: no limit."""
    max_num_queued_tokens: int | None = None
    """The same for the tokens of their prompts; no longer prompt is ever accepted. Default: no limit."""
    iteration_stats_capacity: int = 1024
    """Iterations that `LLMEngine.iteration_stats` remembers between two calls; 0: none."""
    profile: bool = False
    """Whether each operation of a step is timed, for `LLMEngine.profile`; on the CPU only, where it costs about a
    hundredth of a short step."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            setattr(self, name, checked_int(name, getattr(self, name), low=1))
        for name in ("max_model_len", "num_kv_blocks", "num_threads"):
            if getattr(self, name) is not None:
                setattr(self, name, checked_int(name, getattr(self, name), low=1))
        if self.kv_cache_memory_bytes is not None:
            self.kv_cache_memory_bytes = checked_int(
                "kv_cache_memory_bytes", self.kv_cache_memory_bytes, low=1, high=2**63 - 1
            )
        self.seed = checked_int("seed", self.seed, low=0, high=2**64 - 1)
        for name in ("model", "tokenizer"):
            value = getattr(self, name)
            if not (isinstance(value, (str, Path)) and str(value)) and (name, value) != ("tokenizer", None):
                raise InvalidArgumentError(f"{name} must be a path or a name, got {value!r}")
        for name in ("revision", "device"):
            value = getattr(self, name)
            if not isinstance(value, str) and (name, value) != ("revision", None):
                raise InvalidArgumentError(f"{name} must be a string, got {value!r}")
        if self.block_size not in BLOCK_SIZES:
            raise InvalidArgumentError(f"block_size must be one of {BLOCK_SIZES}, got {self.block_size}")
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        if self.quantization is not None:
            check_choice("quantization", self.quantization, QUANTIZATIONS)
            if self.device != "cpu":
                raise InvalidArgumentError(
                    f"quantization={self.quantization!r} is for device='cpu', got {self.device!r}"
                )
        check_choice("kv_cache_dtype", self.kv_cache_dtype, ("auto", "float32", "bfloat16", "float16", "int8"))
        check_bool("batch_invariant", self.batch_invariant)
        if not self.batch_invariant and self.device == "cpu":
            raise InvalidArgumentError(
                "batch_invariant=False is for device='cuda'; the CPU has nothing to gain from it"
            )
        share = as_finite(self.gpu_memory_utilization)
        if share is None or not 0 < share <= 1:
            raise InvalidArgumentError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}")
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise InvalidArgumentError(
                "set num_kv_blocks or kv_cache_memory_bytes, not both: "
                f"got {self.num_kv_blocks} and {self.kv_cache_memory_bytes}"
            )
        check_bool("profile", self.profile)
        if self.profile and self.device != "cpu":
            raise InvalidArgumentError(
                f"profile=True is for device='cpu', got {self.device!r}: elsewhere a step only enqueues its operations"
            )
        check_scheduling(self)
