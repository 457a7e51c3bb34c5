"""BatchRun: gives an engine the lines of a batch, and writes their answers as they finish."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from steploop.batch.job import TODO, BatchJob
from steploop.errors import EngineDeadError, InvalidRequestError
from steploop.openai.answer import answer_head
from steploop.openai.chat import ChatCall
from steploop.openai.completions import CompletionCall
from steploop.openai.errors import ApiError, as_api_error
from steploop.openai.model import ServedModel
from steploop.openai.protocol import ChatCompletionRequest, CompletionRequest
from steploop.outputs import RequestOutput
from steploop.progress import RequestProgress
from steploop.request_state import RequestState

QUEUE_FACTOR = 2
"""Sequences in the engine for each that may run, so that a slot that becomes free is taken at once."""

_FIELDS = {kind: frozenset(kind.model_fields) for kind in (CompletionRequest, ChatCompletionRequest)}
_ID_LENGTH = 24


@dataclass
class BatchSummary:
    """What a run came to."""

    num_lines: int
    """Of the input, without empty ones."""
    num_before: int
    """Lines that an earlier run has answered."""
    num_answered: int = 0
    """Lines answered by this run."""
    num_errors: int = 0
    """Lines in the errors file."""
    num_prompt_tokens: int = 0
    """Of the lines answered by this run, as what follows."""
    num_cached_tokens: int = 0
    """Those of the prompts that the prefix cache had."""
    num_output_tokens: int = 0
    duration: float = 0.0
    """Seconds, without loading the model."""


@dataclass
class _Line:
    """A line on its way: ready for the engine, or in it."""

    index: int
    custom_id: str | None = None
    call: ChatCall | CompletionCall | None = None
    requests: list[RequestState] = field(default_factory=list)
    """One for each prompt."""
    error: ApiError | None = None
    """Instead of all these."""
    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    """The last of each prompt, by its number."""
    num_tokens: int = 0
    """So far."""

    @property
    def num_sequences(self) -> int:
        return 0 if self.call is None else self.call.params.n * len(self.requests)


class BatchRun:
    """One run of a job on an engine that has nothing else to do.

    Args:
        model_alias: What bodies may call the model besides its name.
    """

    def __init__(
        self, job: BatchJob, model: ServedModel, model_alias: str, order: str, *, show_progress: bool = False
    ) -> None:
        self._job = job
        self._model = model
        self._alias = model_alias
        self._left = iter(job.order(order, model.engine.config.max_num_seqs).tolist())
        self._max_sequences = QUEUE_FACTOR * model.engine.config.max_num_seqs
        self._ahead: deque[Future[_Line]] = deque()
        self._in_engine: dict[str, _Line] = {}
        self._num_sequences = 0
        self.summary = BatchSummary(job.num_lines, job.num_before)
        """So far."""
        self._progress = RequestProgress(
            job.num_lines,
            description="Answering",
            enabled=show_progress,
            num_finished=job.num_lines - job.count(TODO),
            amount=int(job.work[job.state == TODO].sum()),
        )

    def run(self) -> BatchSummary:
        """Answers all that is left.

        Raises:
            SteploopError: the engine has failed, an answer cannot be written, or the input has changed.
            KeyboardInterrupt: Ctrl-C. Close the engine: it has requests of the job.
        """
        started = time.monotonic()
        # A thread of its own renders and tokenises while the engine steps.
        with ThreadPoolExecutor(1, "steploop-batch") as executor, self._progress:
            try:
                while self._prepare_ahead(executor) or self._in_engine:
                    self._fill()
                    if self._in_engine:
                        for output in self._model.engine.step():
                            self._take(output)
            except BaseException:
                executor.shutdown(wait=False, cancel_futures=True)
                raise
        self.summary.duration = time.monotonic() - started
        self.summary.num_errors = self._job.num_errors
        return self.summary

    def _prepare_ahead(self, executor: ThreadPoolExecutor) -> bool:
        """Whether there are lines that are not in the engine yet."""
        while len(self._ahead) < self._model.engine.config.max_num_seqs:
            index = next(self._left, None)
            if index is None:
                break
            self._ahead.append(executor.submit(self._prepare, index))
        return bool(self._ahead)

    def _fill(self) -> None:
        """Gives the engine lines, as many as it should have. Waits for one only if it has none."""
        while self._ahead and self._num_sequences < self._max_sequences:
            if self._in_engine and not self._ahead[0].done():
                return
            line = self._ahead[0].result()
            self._ahead.popleft()
            if line.error is not None:
                self._fail(line, line.error)
                continue
            self._submit(line)

    def _submit(self, line: _Line) -> None:
        engine, submitted = self._model.engine, []
        try:
            for request in line.requests:
                engine.submit(request)
                submitted.append(request.request_id)
        except InvalidRequestError as error:  # such as one that could never fit the KV cache
            engine.abort_request(submitted)
            assert line.call is not None
            self._fail(line, as_api_error(error, _FIELDS[type(line.call.body)]))
            return
        self._in_engine.update(dict.fromkeys(submitted, line))
        self._num_sequences += line.num_sequences

    def _prepare(self, index: int) -> _Line:
        request = self._job.read(index)
        line, body = _Line(index, request.custom_id), request.body
        if body.model == self._alias:
            body = body.model_copy(update={"model": None})
        try:
            line.call = self._read_call(body)
            for number, prompt in enumerate(line.call.prompts):
                params = line.call.params
                if params.seed is None:
                    params = dataclasses.replace(params, seed=self._job.key.seed(request.custom_id, number))
                line.requests.append(
                    self._model.engine.prepare_request(f"{index}/{number}", prompt, params, **line.call.options)
                )
        except EngineDeadError:
            raise
        except Exception as error:  # whatever it is, it must not cost the other lines
            line.error = as_api_error(error, _FIELDS[type(body)])
        return line

    def _read_call(self, body: ChatCompletionRequest | CompletionRequest) -> ChatCall | CompletionCall:
        if isinstance(body, ChatCompletionRequest):
            return ChatCall.read(self._model, body)
        return CompletionCall.read(self._model, body)

    def _take(self, output: RequestOutput) -> None:
        """Takes in what a step brought of a request."""
        line = self._in_engine.get(output.request_id)
        if line is None:  # aborted
            return
        if output.finished:
            del self._in_engine[output.request_id]
        number = int(output.request_id.partition("/")[2])
        before = line.outputs.get(number)
        num_new = output.metrics.num_generation_tokens - (0 if before is None else before.metrics.num_generation_tokens)
        line.outputs[number] = output
        line.num_tokens += num_new
        if len(line.outputs) == len(line.requests) and all(one.finished for one in line.outputs.values()):
            self._finish(line)
            rest = int(self._job.work[line.index]) - (line.num_tokens - num_new)
            self._progress.update(num_finished=1, num_tokens=num_new, amount=max(0, rest))
        else:
            self._progress.update(num_finished=0, num_tokens=num_new, amount=num_new)

    def _finish(self, line: _Line) -> None:
        self._num_sequences -= line.num_sequences
        assert line.call is not None and line.custom_id is not None
        outputs = [line.outputs[number] for number in range(len(line.requests))]
        try:
            content = line.call.whole(outputs)
        except Exception as error:
            self._job.write_error(line.index, line.custom_id, as_api_error(error))
            return
        name = self._job.name(line.index)
        _name_calls(content, name)
        answer_id = f"{line.call.id_prefix}-{name[:_ID_LENGTH]}"
        head = answer_head(answer_id, line.call.kind, self._model.name)
        self._job.write_answer(line.index, line.custom_id, {**head, **content})
        usage, summary = content["usage"], self.summary
        summary.num_answered += 1
        summary.num_prompt_tokens += usage["prompt_tokens"]
        summary.num_cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        summary.num_output_tokens += usage["completion_tokens"]

    def _fail(self, line: _Line, error: ApiError) -> None:
        self._job.write_error(line.index, line.custom_id, error)
        self._progress.update(num_finished=1, num_tokens=0, amount=int(self._job.work[line.index]))


def _name_calls(content: dict[str, Any], name: str) -> None:
    """Gives calls of tools ids that are the same in every run."""
    for choice in content["choices"]:
        for number, call in enumerate(choice.get("message", {}).get("tool_calls") or []):
            call["id"] = f"call_{name[:_ID_LENGTH]}_{choice['index']}_{number}"
