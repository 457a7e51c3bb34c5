"""`POST /v1/completions`: from its body to prompts for the engine, and from their outputs to its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, cast

from steploop.errors import InvalidRequestError
from steploop.openai.answer import check_not_failed, usage_of
from steploop.openai.logprobs import completion_logprobs, prompt_logprobs
from steploop.openai.model import ServedModel
from steploop.openai.protocol import CompletionRequest
from steploop.openai.sampling import request_options, sampling_params
from steploop.outputs import CompletionOutput, RequestOutput
from steploop.prompts import Prompt
from steploop.sampling_params import SamplingParams


@dataclass(frozen=True)
class CompletionCall:
    """What a body comes to."""

    kind: ClassVar[str] = "text_completion"
    id_prefix: ClassVar[str] = "cmpl"

    model: ServedModel
    body: CompletionRequest
    prompts: list[Prompt]
    params: SamplingParams
    options: dict[str, Any]
    """As `LLMEngine.add_request` takes them."""

    @classmethod
    def read(cls, model: ServedModel, body: CompletionRequest) -> CompletionCall:
        """Checks a body, except for what the engine checks.

        Raises:
            ApiError, InvalidRequestError: it cannot be answered.
        """
        model.check_name(body.model)
        prompts = _prompts(body)
        n = 1 if body.n is None else body.n
        model.check_choices(len(prompts), n)
        if body.best_of not in (None, n):
            raise InvalidRequestError(f"best_of must be n={n}: answers are not ranked, got {body.best_of}")
        if body.suffix:
            raise InvalidRequestError("suffix must be empty: the model does not fill in the middle")
        if body.echo and body.stream:
            raise InvalidRequestError("echo must be false in a stream")
        scored = body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs
        if scored is not None and n > 1:
            raise InvalidRequestError("n must be 1 with prompt_logprobs, and with echo and logprobs")
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        if body.add_special_tokens is False:
            prompts = _without_special_tokens(model, prompts)
        params = sampling_params(
            body,
            max_tokens=1 if _only_scores(body) else max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=scored,
        )
        return cls(model, body, prompts, params, request_options(body))

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer's choices and usage.

        Args:
            outputs: The last of each prompt.

        Raises:
            ApiError: the engine failed on one.
        """
        body, choices = self.body, []
        for number, output in enumerate(outputs):
            check_not_failed(output, body)
            for completion in output.outputs:
                choice = make_choice(number * self.params.n + completion.index, completion.text, completion)
                if body.logprobs is not None:
                    assert completion.logprobs is not None
                    choice["logprobs"] = completion_logprobs(
                        completion.token_ids, completion.logprobs, body.logprobs, offset=0
                    )
                if _only_scores(body):
                    _drop_output(choice)
                if body.echo:
                    _prepend_prompt(self.model, choice, output, body)
                if body.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
                choices.append(choice)
        usage = usage_of(outputs)
        if _only_scores(body):
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return {"choices": choices, "usage": usage}


def make_choice(index: int, text: str, completion: CompletionOutput) -> dict[str, Any]:
    """A choice with that text, without log-probabilities."""
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }


def _only_scores(body: CompletionRequest) -> bool:
    """Whether it asks for the prompt's log-probabilities alone. The engine makes a token all the same."""
    return body.max_tokens == 0 and bool(body.echo)


def _without_special_tokens(model: ServedModel, prompts: list[Prompt]) -> list[Prompt]:
    return [
        {"prompt": prompt, "prompt_token_ids": model.tokenizer.encode_rendered(prompt)}
        if isinstance(prompt, str)
        else prompt
        for prompt in prompts
    ]


def _prompts(body: CompletionRequest) -> list[Prompt]:
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return cast(list[Prompt], prompt)
    return [cast(Prompt, prompt)]


def _drop_output(choice: dict[str, Any]) -> None:
    choice |= {"text": "", "finish_reason": "length", "stop_reason": None}
    if choice["logprobs"] is not None:
        choice["logprobs"] = {name: [] for name in choice["logprobs"]}


def _prepend_prompt(model: ServedModel, choice: dict[str, Any], output: RequestOutput, body: CompletionRequest) -> None:
    text = output.prompt
    if text is None:
        text = model.tokenizer.decode(output.prompt_token_ids)
    choice["text"] = text + choice["text"]
    if body.logprobs is None:
        return
    entries = output.prompt_logprobs or [None] * len(output.prompt_token_ids)  # none if it ended before
    scored = completion_logprobs(output.prompt_token_ids, entries, body.logprobs, offset=0)
    scored["tokens"][0] = model.tokenizer.decode(output.prompt_token_ids[:1])
    *offsets, offset = accumulate(map(len, scored["tokens"]), initial=0)
    scored["text_offset"] = offsets
    of_output = choice["logprobs"]
    of_output["text_offset"] = [offset + place for place in of_output["text_offset"]]
    choice["logprobs"] = {name: scored[name] + of_output[name] for name in scored}
