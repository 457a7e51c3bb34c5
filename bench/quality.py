"""What each dtype and quantisation costs in quality: perplexity on text, and how often the best token is the same.

Each row is a way to load the model; its logits, by the engine's own kernels and KV cache, are held against those of
transformers in float32 on the same weights. The text, tests/data/prose.txt and essays.txt, is cut into windows of 1,024
tokens; perplexity is over each token of a window but the first, agreement over every position.

Every row is measured twice. First on the model's weights. Then on weights that compute the same but are harder to
quantise: each channel between up and down and between v and o is multiplied on the one side, and divided on the other,
by a factor of its own, exp(0.7 * normal). Large models have such channels by themselves.

python bench/quality.py                                # the demo model; about 20 minutes on two cores
python bench/quality.py --rows int8 int4 --tokens 2048
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "bench" / "engine"))

from export_hf import export  # noqa: E402
from machine import describe_machine  # noqa: E402
from script import RESULTS, positive, say, write_json  # noqa: E402

import steploop  # noqa: E402
from steploop import _C  # noqa: E402
from steploop.demo.model import find_demo_model  # noqa: E402
from steploop.tokenizer import Tokenizer  # noqa: E402
from steploop.weights import (  # noqa: E402
    Checkpoint,
    ModelSpec,
    load_model,
    load_quantized,
    open_checkpoint,
    recipe_for,
)
from steploop.weights.recipe import RECIPES, Recipe  # noqa: E402

TEXTS = ("prose.txt", "essays.txt")
WINDOW = 1024
SPREAD = 0.7
SEED = 0
BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Row:
    """A way to load and run a model."""

    dtype: str = "bfloat16"
    quantization: str | None = None
    """As EngineConfig's: with what the engine makes of it for this model."""
    recipe: Recipe | None = None
    """Instead of that: one of our own."""
    kv_cache_dtype: str | None = None
    """None: the dtype."""
    of_file: bool = False
    """Reads the file itself rather than its export, for the sake of the codes in it; left out where it has none."""


_INT8 = RECIPES["int8"].formats
_LAYERS = tuple(kind for kind in _INT8 if kind != "lm_head")
_INT8_LAYERS = dict.fromkeys(_LAYERS, "int8")
ROWS = {
    "float32": Row(dtype="float32"),
    "bfloat16": Row(),
    "int8": Row(quantization="int8"),
    "int8-naive": Row(recipe=Recipe(formats=_INT8)),
    "int8-smoothed": Row(recipe=Recipe(formats=_INT8, smoothed=_LAYERS)),
    "int8-rotated": Row(recipe=Recipe(formats=_INT8, rotated=tuple(_INT8))),
    "int8-bfloat16-head": Row(recipe=Recipe(formats=_INT8_LAYERS, smoothed=_LAYERS, rotated=_LAYERS)),
    "int4": Row(quantization="int4"),
    "int4-always": Row(recipe=RECIPES["int4"]),
    "int4-of-file": Row(quantization="int4", of_file=True),
    "bfloat16-kv-int8": Row(kv_cache_dtype="int8"),
}
"""By name. Weights are quantised as the engine does by default, or with parts of that left out; "int4-always" smooths
and rotates all weights, also those that were in 4 bits before."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says about the windows, position by position."""

    losses: torch.Tensor
    """-log(probability) of each token that follows another, float64 [tokens - windows]."""
    best: torch.Tensor
    """The most likely next token, [tokens]."""

    @property
    def perplexity(self) -> float:
        return math.exp(float(self.losses.mean()))

    def agreement(self, other: Prediction) -> float:
        """The share of positions where the other's best token is the same."""
        return float((self.best == other.best).double().mean())


def predict(logits_of: Callable[[list[int]], torch.Tensor], windows: Iterable[list[int]]) -> Prediction:
    """Puts each window of two tokens or more through `logits_of`: float32 [tokens, vocab_size] of token ids."""
    losses, best = [], []
    for window in windows:
        logits = logits_of(window)
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="none"))
        best.append(logits.argmax(-1))
    return Prediction(losses=torch.cat(losses).double(), best=torch.cat(best))


def cut(token_ids: Sequence[int], size: int) -> list[list[int]]:
    """Windows of `size` tokens, the last one shorter; one token alone predicts nothing and is left out."""
    windows = [list(token_ids[first : first + size]) for first in range(0, len(token_ids), size)]
    return [window for window in windows if len(window) > 1]


def reference_logits(folder: Path) -> Callable[[list[int]], torch.Tensor]:
    """transformers in float32 on a model folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits_of(token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
        return logits

    return logits_of


def load(checkpoint: Checkpoint, row: Row) -> _C.Model:
    """The row's model."""
    if row.recipe is not None:
        return load_quantized(checkpoint, row.dtype, row.recipe)
    return load_model(checkpoint, row.dtype, quantization=row.quantization)


def engine_logits(model: _C.Model, row: Row, window: int, num_threads: int) -> Callable[[list[int]], torch.Tensor]:
    """An engine's, with room for one window."""
    engine = _C.Engine(
        model,
        max_model_len=window,
        block_size=BLOCK_SIZE,
        num_kv_blocks=-(-window // BLOCK_SIZE),
        kv_cache_dtype=row.kv_cache_dtype or row.dtype,
        num_threads=num_threads,
    )
    return lambda token_ids: torch.from_numpy(engine.teacher_forced_logits(token_ids))


def rescale(spec: ModelSpec, folder: Path, target: Path) -> None:
    """Writes the exported model of `folder` once more, its channels between linear layers rescaled."""
    tensors = load_file(folder / "model.safetensors")
    rescale_channels(spec, tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())


def rescale_channels(spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> None:
    """Changes float32 weights, in place, to others that compute the same."""
    random = torch.Generator().manual_seed(SEED)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        inner = _factors(spec.intermediate_size, random)
        _scale_rows(tensors, f"{prefix}mlp.up_proj", inner)
        tensors[f"{prefix}mlp.down_proj.weight"] /= inner
        values = _factors(spec.num_kv_heads * spec.head_dim, random)
        _scale_rows(tensors, f"{prefix}self_attn.v_proj", values)
        # A value head feeds as many query heads as share it.
        repeated = values.view(spec.num_kv_heads, spec.head_dim).repeat_interleave(
            spec.num_heads // spec.num_kv_heads, 0
        )
        tensors[f"{prefix}self_attn.o_proj.weight"] /= repeated.flatten()


def _factors(count: int, random: torch.Generator) -> torch.Tensor:
    return torch.exp(SPREAD * torch.randn(count, generator=random))


def _scale_rows(tensors: dict[str, torch.Tensor], name: str, factors: torch.Tensor) -> None:
    tensors[f"{name}.weight"] *= factors[:, None]
    if f"{name}.bias" in tensors:
        tensors[f"{name}.bias"] *= factors


def measure(checkpoint: Checkpoint, row: Row, windows: list[list[int]], num_threads: int, reference: Prediction) -> Any:
    """A row's figures."""
    began = time.monotonic()
    model = load(checkpoint, row)
    load_seconds = time.monotonic() - began
    prediction = predict(engine_logits(model, row, max(map(len, windows)), num_threads), windows)
    return {
        "perplexity": prediction.perplexity,
        "perplexity_ratio": prediction.perplexity / reference.perplexity,
        "top1_agreement": prediction.agreement(reference),
        "weight_bytes": model.weight_bytes,
        "load_seconds": round(load_seconds, 1),
    }


def format_figures(name: str, figures: dict[str, Any]) -> str:
    """A row of the table."""
    return (
        f"  {name:20} {figures['perplexity']:10.3f} {(figures['perplexity_ratio'] - 1) * 100:+9.2f}% "
        f"{figures['top1_agreement'] * 100:9.2f}% {figures['weight_bytes'] / 2**20:9.0f}"
    )


def format_report(result: dict[str, Any]) -> str:
    """The tables that a person reads."""
    machine, settings = result["machine"], result["settings"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB",
        f"{settings['model']}, {settings['num_tokens']} tokens in windows of {settings['window']}; "
        + ", ".join(f"{package} {number}" for package, number in result["versions"].items()),
        f"transformers in float32: perplexity {result['reference']['perplexity']:.3f}",
    ]
    for weights in dict.fromkeys(row["weights"] for row in result["rows"]):
        lines += ["", f"weights {weights}", f"  {'':20} {'perplexity':>10} {'more':>10} {'same best':>10} {'MiB':>9}"]
        lines += [format_figures(row["row"], row) for row in result["rows"] if row["weights"] == weights]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measures, prints rows as they come and then the tables, writes JSON after each row, returns the exit code."""
    args = _parse(argv)
    torch.set_num_threads(args.threads)
    path = args.model or find_demo_model()
    original = open_checkpoint(path)
    windows = cut(_token_ids(original, args.tokens), args.window)
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "versions": {
            "steploop": steploop.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "settings": {
            "model": path.name,  # a name, not where it lies
            "texts": list(TEXTS),
            "num_tokens": sum(map(len, windows)),
            "window": args.window,
            "spread": SPREAD,
            "seed": SEED,
            "num_threads": args.threads,
        },
    }
    with tempfile.TemporaryDirectory() as temporary:
        plain, rescaled = Path(temporary) / "plain", Path(temporary) / "rescaled"
        say("exporting the model ...")
        export(original, plain, "float32")
        rescale(original.spec, plain, rescaled)
        say("transformers in float32 ...")
        reference = predict(reference_logits(plain), windows)
        result |= {"reference": {"perplexity": reference.perplexity}, "rows": []}
        for weights, folder in (("as they are", plain), ("rescaled", rescaled)):
            for name in args.rows:
                row = ROWS[name]
                if row.of_file and (folder is rescaled or not recipe_for(original, "int4").from_codes):
                    continue
                checkpoint = original if row.of_file else open_checkpoint(folder)
                figures = measure(checkpoint, row, windows, args.threads, reference)
                result["rows"].append({"weights": weights, "row": name, **figures})
                write_json(args.output, result)
                say(f"{weights}: {format_figures(name, figures)}")
    print(format_report(result), flush=True)
    return 0


def _token_ids(checkpoint: Checkpoint, limit: int | None) -> list[int]:
    """The texts', one after the other."""
    if checkpoint.tokenizer is None:
        raise SystemExit(f"{checkpoint.path} has no tokenizer")
    tokenizer = Tokenizer.load(checkpoint.tokenizer)
    token_ids: list[int] = []
    for name in TEXTS:
        token_ids += tokenizer.encode((ROOT / "tests" / "data" / name).read_text())
    return token_ids[:limit]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder or GGUF file; default: the demo model")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), help="default: all")
    parser.add_argument("--tokens", type=positive, metavar="N", help="of the text, at least 2; default: all")
    parser.add_argument("--window", type=positive, default=WINDOW, metavar="N", help=f"default {WINDOW}")
    parser.add_argument("--threads", type=positive, default=2, metavar="N", help="default 2")
    parser.add_argument("--output", type=Path, default=RESULTS / "quality.json", help="JSON")
    args = parser.parse_args(argv)
    if args.window < 2 or (args.tokens or 2) < 2:
        parser.error("--window and --tokens must be >= 2")
    return args


if __name__ == "__main__":
    sys.exit(main())
