"""Command line options that several commands share: the engine's settings, and how they become an EngineConfig."""

from __future__ import annotations

import argparse
from typing import Any

from steploop.config import QUANTIZATIONS, EngineConfig
from steploop.scheduling import PREEMPTION_MODES, QUEUE_ORDERS, SCHEDULING_POLICIES

MODEL_HELP = "a model folder, a packed one too, a GGUF file, or a name on the Hugging Face hub"
REVISION_HELP = "branch, tag or commit on the hub"


def add_full_engine_options(parser: argparse.ArgumentParser) -> None:
    """Everything that `engine_config` reads but the model."""
    engine = parser.add_argument_group("engine")
    add_engine_options(engine)
    engine.add_argument(
        "--tokenizer", metavar="MODEL", help="take the tokenizer from another model: a folder, GGUF file or hub name"
    )
    engine.add_argument("--revision", metavar="NAME", help=REVISION_HELP)
    engine.add_argument("--max-model-len", type=int, metavar="N", help="longest sequence, prompt and output, in tokens")
    engine.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="sequences in a step (default 64)")
    engine.add_argument(
        "--no-prefix-caching", action="store_true", help="compute every prompt whole, whatever prompts share"
    )
    engine.add_argument(
        "--trace",
        metavar="FILE",
        help="write what happens to each prompt, step by step, into FILE: JSON for ui.perfetto.dev",
    )
    add_scheduling_options(parser.add_argument_group("scheduling", "See EngineConfig for what each choice means."))


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The settings that `add_full_engine_options` has asked for, of `arguments.model`.

    Raises:
        InvalidArgumentError: a value that cannot be.
    """
    return EngineConfig(
        model=arguments.model,
        tokenizer=arguments.tokenizer,
        revision=arguments.revision,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        device=arguments.device,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        num_threads=arguments.num_threads,
        **scheduling_settings(arguments),
    )


def scheduling_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `add_scheduling_options` and --no-prefix-caching have asked for, as fields of EngineConfig."""
    same = ("scheduling_policy", "queue_order", "preemption_mode", "swap_space_bytes", "target_step_duration_ms")
    return {
        **{name: getattr(arguments, name) for name in same},
        "enable_prefix_caching": not arguments.no_prefix_caching,
        "enable_chunked_prefill": not arguments.no_chunked_prefill,
    }


def add_engine_options(parser: argparse._ActionsContainer) -> None:
    """Those that the demo has, too."""
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="compute type; float16 needs CUDA (default auto)",
    )
    add_quantization(parser)
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default cpu)")
    parser.add_argument("--num-threads", type=int, metavar="N", help="threads of a step (default: physical cores)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, metavar="N", help="tokens in a step (default 2048)"
    )
    parser.add_argument(
        "--kv-cache-memory-bytes",
        type=int,
        metavar="N",
        help="size of the KV cache (default: enough for every slot, at most a quarter of the memory available, or what "
        "--gpu-memory-utilization leaves)",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="share of a GPU's memory to use (default 0.9)",
    )


def add_quantization(parser: argparse._ActionsContainer) -> None:
    """Adds --quantization."""
    parser.add_argument(
        "--quantization",
        choices=list(QUANTIZATIONS),
        help="store linear weights in 8 or 4 bits, on the CPU (default: not quantised; a packed model: as it is)",
    )


def add_scheduling_options(scheduling: argparse._ActionsContainer) -> None:
    """Those of `EngineConfig` that steer the scheduler."""
    for name, choices, text in (
        ("--scheduling-policy", SCHEDULING_POLICIES, "who may start, and who gives way when the KV cache is full"),
        ("--queue-order", QUEUE_ORDERS, "who starts next; priority and fair go by what requests say in the Python API"),
        ("--preemption-mode", PREEMPTION_MODES, "what becomes of the KV cache of a prompt that gives way"),
    ):
        scheduling.add_argument(name, default=choices[0], choices=choices, help=f"{text} (default {choices[0]})")
    scheduling.add_argument(
        "--swap-space-bytes",
        type=int,
        metavar="N",
        help="host memory for --preemption-mode swap and auto (default: as much as the KV cache)",
    )
    scheduling.add_argument(
        "--no-chunked-prefill",
        action="store_true",
        help="prompts whole, in steps of their own; --max-num-batched-tokens must hold the longest",
    )
    scheduling.add_argument(
        "--target-step-duration-ms",
        type=float,
        metavar="MS",
        help="how long a step may take: prompts get what decodes leave of it",
    )
