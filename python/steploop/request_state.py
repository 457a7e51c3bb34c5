"""RequestState: what Python keeps of a request in flight, and how native step outputs become a RequestOutput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from steploop.detokenizer import Detokenizer
from steploop.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from steploop.stop_strings import StopStrings

if TYPE_CHECKING:
    from steploop import _C
    from steploop.grammar.mask import GrammarMask
    from steploop.request_options import RequestOptions
    from steploop.sampling_params import SamplingParams
    from steploop.tokenizer import Tokenizer


class RequestState:
    """A checked request; first waiting to be added, then collecting the tokens of its samples."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        options: RequestOptions,
        tokenizer: Tokenizer | None,
        native_params: _C.SamplingParams,
        grammar: GrammarMask | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.native_params = native_params
        self.options = options
        self.grammar = grammar
        """What the next tokens must follow; None: nothing."""
        self.ended = False
        """Its caller has its last output; whatever steps still bring is not for them."""
        self.stopped: list[int] = []
        """Samples that a stop string ended in the last update: no step knows of it."""
        self._prompt = prompt
        self._samples = [_Sample(index, prompt_token_ids, params, tokenizer) for index in range(params.n)]
        self._arrival_time = math.nan
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._tokenizer = tokenizer

    def update(self, step_outputs: Sequence[_C.StepOutput]) -> RequestOutput:
        """Takes in what a step brought to any of the samples and returns the request's state after it."""
        self.stopped = []
        for step_output in step_outputs:
            sample = self._samples[step_output.index]
            if sample.finish_reason is not None:
                continue
            self._arrival_time = step_output.arrival_time
            # That of the first sample: the others fork from it, or find in the cache what it computed.
            if step_output.index == 0:
                self._num_cached_tokens = step_output.num_cached_tokens
            if step_output.prompt_logprobs is not None:
                scored = zip(self.prompt_token_ids[1:], step_output.prompt_logprobs, strict=True)
                self._prompt_logprobs = [
                    None,
                    *(_describe(token_id, *score, tokenizer=self._tokenizer) for token_id, score in scored),
                ]
            if sample.update(step_output) and not step_output.finished:
                self.stopped.append(step_output.index)
            if self.grammar is not None and sample.finish_reason is None:
                self.grammar.accept(step_output.index, step_output.token_ids)
        return self._output()

    def fail(self) -> RequestOutput:
        """The request's last output once it cannot go on: what is unfinished has ended with "error"."""
        for sample in self._samples:
            sample.finish_reason = sample.finish_reason or "error"
        return self._output()

    def _output(self) -> RequestOutput:
        # Made for every request of every step: one pass, and no more objects than are asked for.
        outputs = []
        finished = True
        first_scheduled_time = first_token_time = math.inf
        last_token_time = -math.inf
        num_preemptions = num_tokens = num_intervals = 0
        generation_time = 0.0
        for sample in self._samples:
            outputs.append(sample.output())
            finished = finished and sample.finish_reason is not None
            num_preemptions += sample.num_preemptions
            # Comparisons with nan are false.
            if sample.first_scheduled_time < first_scheduled_time:
                first_scheduled_time = sample.first_scheduled_time
            if sample.first_token_time < first_token_time:
                first_token_time = sample.first_token_time
            if sample.last_token_time > last_token_time:
                last_token_time = sample.last_token_time
            if count := len(sample.token_ids):
                num_tokens += count
                num_intervals += count - 1
                generation_time += sample.last_token_time - sample.first_token_time
        self.ended = finished
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=outputs,
            finished=finished,
            num_cached_tokens=self._num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time=self._arrival_time,
                first_scheduled_time=None if first_scheduled_time == math.inf else first_scheduled_time,
                first_token_time=None if first_token_time == math.inf else first_token_time,
                last_token_time=None if last_token_time == -math.inf else last_token_time,
                num_preemptions=num_preemptions,
                num_generation_tokens=num_tokens,
                time_per_output_token=generation_time / num_intervals if num_intervals else None,
            ),
        )


class _Sample:
    """One of a request's sequences as it grows. Times are nan until they have come."""

    def __init__(
        self, index: int, prompt_token_ids: list[int], params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.num_preemptions = 0
        self.first_scheduled_time = math.nan
        self.first_token_time = math.nan
        self.last_token_time = math.nan
        self._index = index
        self._wants_logprobs = params.logprobs is not None
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._min_tokens = params.min_tokens
        self._stop_strings: StopStrings | None = None
        if params.stop:
            self._stop_strings = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._text = ""
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._stop_reason: int | str | None = None

    def update(self, step_output: _C.StepOutput) -> bool:
        """Takes in what a step brought; whether a stop string has come with it."""
        self.num_preemptions = step_output.num_preemptions
        self.first_scheduled_time = step_output.first_scheduled_time
        self.first_token_time = step_output.first_token_time
        self.last_token_time = step_output.last_token_time
        self._stop_reason = step_output.stop_token_id
        self.token_ids += step_output.token_ids
        if self._wants_logprobs:
            self._add_logprobs(step_output)
        stopped = self._detokenizer is not None and self._add_text(self._detokenizer, step_output)
        # Last: a failure above leaves it unfinished.
        self.finish_reason = "stop" if stopped else step_output.finish_reason
        return stopped

    def _add_text(self, detokenizer: Detokenizer, step_output: _C.StepOutput) -> bool:
        """Whether a stop string has come."""
        text = detokenizer.append(step_output.token_ids)
        if step_output.finished:
            text += detokenizer.flush()
        stop_strings = self._stop_strings
        if stop_strings is None or len(self.token_ids) <= self._min_tokens:
            self._text += text
            return False
        self._text += stop_strings.push(text)
        if stop_strings.matched is not None:
            self._stop_reason = stop_strings.matched
            return True
        if step_output.finished:
            self._text += stop_strings.flush()
        return False

    def output(self) -> CompletionOutput:
        """The sample so far."""
        return CompletionOutput(
            index=self._index,
            text=self._text,
            token_ids=self.token_ids.copy(),
            cumulative_logprob=self._cumulative_logprob if self._wants_logprobs else None,
            logprobs=self._logprobs.copy() if self._wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def _add_logprobs(self, step_output: _C.StepOutput) -> None:
        tops = step_output.top_logprobs or [[]] * len(step_output.token_ids)
        for token_id, logprob, rank, top in zip(
            step_output.token_ids, step_output.logprobs, step_output.ranks, tops, strict=True
        ):
            self._cumulative_logprob += logprob
            self._logprobs.append(_describe(token_id, logprob, rank, top, tokenizer=self._tokenizer))


def _describe(
    token_id: int, logprob: float, rank: int | None, top: list[tuple[int, float]], *, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """A token and the most likely ones in its place, those first."""

    def text(of: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([of])

    entry = {other: Logprob(value, place, text(other)) for place, (other, value) in enumerate(top, start=1)}
    if token_id not in entry:
        entry[token_id] = Logprob(logprob, rank, text(token_id))
    return entry
