"""Steps an engine to its end."""

from __future__ import annotations

from typing import Any

from steploop import LLMEngine, RequestOutput, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def drain(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Every output of every request, by id, in order."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def run(engine: LLMEngine, prompt: Any, params: SamplingParams = GREEDY) -> RequestOutput:
    """One request alone: its last output."""
    engine.add_request("only", prompt, params)
    return drain(engine)["only"][-1]


def tokens(output: RequestOutput) -> list[int]:
    """All new tokens."""
    return output.outputs[0].token_ids
