"""The benchmark's requests: random token ids, lengths drawn from a fixed seed, so that every engine gets the same."""

from __future__ import annotations

import random
from dataclasses import dataclass

SEED = 20261129
NUM_REQUESTS = 64
PROMPT_LENGTHS = (32, 256)
TOKEN_IDS = (20, 49152)  # past the special tokens of SmolLM2's vocabulary, up to its end
MEAN_OUTPUT, MIN_OUTPUT, MAX_OUTPUT = 64, 4, 256
SINGLE_PROMPT_LENGTH = 128
WORKLOADS = ("mixed", "uniform", "single")


@dataclass(frozen=True)
class Request:
    """A prompt and how many tokens to generate after it, whatever they are."""

    prompt_token_ids: list[int]
    num_output_tokens: int


def make_workload(
    name: str, *, num_requests: int = NUM_REQUESTS, max_output: int = MAX_OUTPUT, vocab_size: int | None = None
) -> list[Request]:
    """The requests of a workload, all of them offered at once.

    Args:
        name: "mixed": output lengths are exponential, as if answers ended where they like; "uniform": all are 64;
            "single": one request alone, a prompt of 128 tokens and 256 tokens of output.
        num_requests: Only the first so many; at most 64.
        max_output: No output longer than this.
        vocab_size: For a model with fewer token ids: they wrap around.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {name!r}")
    if not 1 <= num_requests <= NUM_REQUESTS:
        raise ValueError(f"num_requests must be in 1..{NUM_REQUESTS}, got {num_requests}")
    if max_output < 1:
        raise ValueError(f"max_output must be >= 1, got {max_output}")
    generator = random.Random(SEED)
    prompts = []
    for _ in range(NUM_REQUESTS):
        length = generator.randint(*PROMPT_LENGTHS)
        prompts.append([generator.randrange(*TOKEN_IDS) for _ in range(length)])
    mixed = [round(generator.expovariate(1 / MEAN_OUTPUT)) for _ in range(NUM_REQUESTS)]
    if name == "mixed":
        outputs = [min(MAX_OUTPUT, max(MIN_OUTPUT, n)) for n in mixed]
    elif name == "uniform":
        outputs = [MEAN_OUTPUT] * NUM_REQUESTS
    else:
        prompts = [[generator.randrange(*TOKEN_IDS) for _ in range(SINGLE_PROMPT_LENGTH)]]
        outputs = [MAX_OUTPUT]
    size = vocab_size or TOKEN_IDS[1]
    return [
        Request([token % size for token in prompt], min(max_output, n))
        for prompt, n in list(zip(prompts, outputs, strict=True))[:num_requests]
    ]
