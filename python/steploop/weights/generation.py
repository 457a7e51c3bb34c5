"""Reads generation_config.json: end-of-sequence tokens and sampling defaults."""

from __future__ import annotations

import logging
from typing import Any

from steploop.errors import InvalidRequestError, ModelLoadError
from steploop.sampling_params import SamplingParams
from steploop.weights.checkpoint import GenerationDefaults

logger = logging.getLogger(__name__)

# generation_config's name -> ours
_SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
# Fields that change the tokens and that steploop lacks, with the value that changes nothing.
_NOT_APPLIED = {"typical_p": 1.0, "no_repeat_ngram_size": 0}


def parse_generation_config(
    generation: dict[str, Any],
    config: dict[str, Any],
    vocab_size: int,
    *,
    generation_name: str = "the model's generation config",
    config_name: str = "the model's config",
) -> GenerationDefaults:
    """Defaults from a parsed generation_config.json, with config.json's end-of-sequence token where it names none.

    Args:
        generation_name: What errors call the first; `config_name` the second.

    Raises:
        ModelLoadError: a value of the wrong type or out of range.
    """
    eos, eos_source = generation.get("eos_token_id"), generation_name
    if eos is None:
        eos, eos_source = config.get("eos_token_id"), config_name
    for name, neutral in _NOT_APPLIED.items():
        if generation.get(name, neutral) not in (neutral, None):
            logger.warning("the model's generation config asks for %s=%s; steploop lacks it", name, generation[name])
    sampling = {ours: generation[name] for name, ours in _SAMPLING_FIELDS.items() if generation.get(name) is not None}
    try:
        checked = SamplingParams(**sampling)
    except InvalidRequestError as error:
        raise ModelLoadError(f"{generation_name}: {error}") from None
    return GenerationDefaults(
        eos_token_ids=_eos_ids(eos, vocab_size, eos_source),
        sampling={name: getattr(checked, name) for name in sampling},
    )


def to_generation_config(generation: GenerationDefaults) -> dict[str, Any]:
    """What `parse_generation_config` reads the same defaults from."""
    sampling = {
        name: generation.sampling[ours] for name, ours in _SAMPLING_FIELDS.items() if ours in generation.sampling
    }
    return {"eos_token_id": list(generation.eos_token_ids), **sampling}


def _eos_ids(value: object, vocab_size: int, source: str) -> tuple[int, ...]:
    """End-of-sequence ids given as one integer, a list, or null. Ids the model cannot emit (such as -1) are left out.

    Raises:
        ModelLoadError: anything else.
    """
    values = value if isinstance(value, list) else [] if value is None else [value]
    ids: dict[int, None] = {}  # in order, each once
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int):
            raise ModelLoadError(f"{source}: eos_token_id must be an integer or a list of integers, got {value!r}")
        if 0 <= item < vocab_size:
            ids[item] = None
    return tuple(ids)
