"""RequestState: what Python keeps of a request in flight, and how a native step output becomes a RequestOutput."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from steploop.detokenizer import Detokenizer
from steploop.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from steploop import _C
    from steploop.sampling_params import SamplingParams
    from steploop.tokenizer import Tokenizer


class RequestState:
    """A checked request; first waiting to be added, then collecting its tokens."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
        self._token_ids: list[int] = []
        self._text = ""
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0

    def update(self, step_output: _C.StepOutput) -> RequestOutput:
        """Takes in what a step brought and returns the request's state after it."""
        self._token_ids += step_output.token_ids
        if self._detokenizer is not None:
            self._text += self._detokenizer.append(step_output.token_ids)
            if step_output.finished:
                self._text += self._detokenizer.flush()
        if self.params.logprobs is not None:
            self._add_logprobs(step_output)
        return self.output(step_output, step_output.finish_reason)

    def output(self, step_output: _C.StepOutput, finish_reason: str | None) -> RequestOutput:
        """The request's state so far."""
        wants_logprobs = self.params.logprobs is not None
        completion = CompletionOutput(
            index=0,
            text=self._text,
            token_ids=self._token_ids.copy(),
            cumulative_logprob=self._cumulative_logprob if wants_logprobs else None,
            logprobs=self._logprobs.copy() if wants_logprobs else None,
            finish_reason=finish_reason,
            stop_reason=step_output.stop_token_id,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            finished=finish_reason is not None,
            metrics=RequestMetrics(
                arrival_time=step_output.arrival_time,
                first_scheduled_time=_time(step_output.first_scheduled_time),
                first_token_time=_time(step_output.first_token_time),
                last_token_time=_time(step_output.last_token_time),
                num_preemptions=step_output.num_preemptions,
                num_generation_tokens=len(self._token_ids),
            ),
        )

    def _add_logprobs(self, step_output: _C.StepOutput) -> None:
        for index, (token_id, logprob) in enumerate(zip(step_output.token_ids, step_output.logprobs, strict=True)):
            self._cumulative_logprob += logprob
            top = step_output.top_logprobs[index] if step_output.top_logprobs else []
            entry = {
                other: Logprob(value, rank, self._token_text(other)) for rank, (other, value) in enumerate(top, start=1)
            }
            if token_id not in entry:
                entry[token_id] = Logprob(logprob, None, self._token_text(token_id))
            self._logprobs.append(entry)

    def _token_text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token_id])


def _time(seconds: float) -> float | None:
    return None if math.isnan(seconds) else seconds
