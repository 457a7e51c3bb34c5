"""LLM: generates for whole lists of prompts; the engine batches them."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from steploop.config import EngineConfig
from steploop.engine import LLMEngine
from steploop.errors import InvalidRequestError, QueueFullError, SteploopError
from steploop.outputs import RequestOutput
from steploop.progress import RequestProgress
from steploop.prompts import Prompt
from steploop.request_state import RequestState
from steploop.sampling_params import SamplingParams
from steploop.tokenizer import Message, Tokenizer

SamplingParamsArgument = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model ready to generate. Takes the settings of `EngineConfig` as keywords, and `trace`; raises as `LLMEngine`.

    One call at a time; for requests that come and go while others run, use `LLMEngine`.
    """

    def __init__(self, model: str | Path, *, trace: str | Path | None = None, **settings: Any) -> None:
        self.engine = LLMEngine(EngineConfig(model=model, **settings), trace=trace)
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParamsArgument = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts.

        Args:
            prompts: One prompt (see `steploop.prompts.Prompt`) or a list of them; as long as you like, whatever
                `max_num_queued_requests` and `max_num_queued_tokens` are.
            sampling_params: For all prompts, or one for each. Default: `SamplingParams()`.
            use_tqdm: Show a progress bar when standard error is a terminal.
            priority: With `queue_order="priority"`: one for each prompt, the lower goes first. Default: 0 for all.

        Returns:
            One finished output for each prompt, in their order.

        Raises:
            InvalidRequestError: any of the prompts or parameters is not valid; then none of them was started.
            KeyboardInterrupt: Ctrl-C; the call's requests are aborted and the LLM can be used again.
        """
        prompt_list = _as_prompt_list(prompts)
        return self._run(self._prepare(prompt_list, sampling_params, priority), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParamsArgument = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations under the model's chat template.

        Args:
            messages: One conversation (a list of messages {"role": ..., "content": ...}) or a list of them.
            add_generation_prompt: End the prompt where the assistant's turn begins.
            continue_final_message: End it within the last message instead, for the model to go on with it.
            tools: Functions that the model may call: `{"type": "function", "function": {"name": ...}}`.
            chat_template_kwargs: Further variables that the template knows, such as `enable_thinking`.

        Returns, raises and the other arguments: as `generate`.
        """
        tokenizer = self._tokenizer()
        conversations = _as_conversation_list(messages)
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = tokenizer.render_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                template_variables=chat_template_kwargs,
            )
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode_rendered(text)})
        return self._run(self._prepare(prompts, sampling_params, priority), use_tqdm)

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer in use.

        Raises:
            InvalidRequestError: the model came without one.
        """
        return self._tokenizer().hf

    def close(self) -> None:
        """Frees the model and the KV cache; may be called again."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise InvalidRequestError(f"{self.engine.config.model} has no tokenizer; set EngineConfig.tokenizer")
        return self.engine.tokenizer

    def _prepare(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParamsArgument,
        priority: Sequence[int] | None,
    ) -> list[RequestState]:
        """Checks every prompt before any is added."""
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params: Sequence[SamplingParams | None] = [sampling_params] * len(prompts)
        elif isinstance(sampling_params, Sequence):
            params = sampling_params
        else:
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams or a list of them, got {sampling_params!r}"
            )
        if len(params) != len(prompts):
            raise InvalidRequestError(
                f"sampling_params must be one for all or one for each prompt, got {len(params)} for {len(prompts)}"
            )
        if priority is not None and not isinstance(priority, Sequence):
            raise InvalidRequestError(f"priority must be a list of integers, got {priority!r}")
        priorities = [0] * len(prompts) if priority is None else priority
        if len(priorities) != len(prompts):
            raise InvalidRequestError(f"priority must be one for each prompt, got {len(priorities)} for {len(prompts)}")
        return [
            self.engine.prepare_request(str(next(self._request_ids)), prompt, one, priority=one_priority)
            for prompt, one, one_priority in zip(prompts, params, priorities, strict=True)
        ]

    def _run(self, requests: list[RequestState], use_tqdm: bool) -> list[RequestOutput]:
        num_tokens = dict.fromkeys((request.request_id for request in requests), 0)
        finished: dict[str, RequestOutput] = {}
        waiting = deque(requests)
        try:
            with RequestProgress(len(requests), enabled=use_tqdm) as progress:
                while len(finished) < len(requests):
                    self._submit(waiting)
                    num_before, new_tokens = len(finished), 0
                    for output in self.engine.step():
                        if output.request_id not in num_tokens:
                            continue  # left over from a call that was interrupted twice
                        length = sum(len(completion.token_ids) for completion in output.outputs)
                        new_tokens += length - num_tokens[output.request_id]
                        num_tokens[output.request_id] = length
                        if output.finished:
                            finished[output.request_id] = output
                    progress.update(num_finished=len(finished) - num_before, num_tokens=new_tokens)
        except BaseException:
            self._discard(num_tokens.keys() - finished.keys())
            raise
        return [finished[request.request_id] for request in requests]

    def _submit(self, waiting: deque[RequestState]) -> None:
        """Adds as many as the engine's queue takes."""
        while waiting:
            try:
                self.engine.submit(waiting[0])
            except QueueFullError:
                if not self.engine.has_unfinished_requests():
                    raise  # no step will make room
                return
            waiting.popleft()

    def _discard(self, request_ids: set[str]) -> None:
        """Aborts requests and takes their last outputs out of the engine."""
        with contextlib.suppress(SteploopError):  # the caller's exception matters more than a dead engine's
            self.engine.abort_request(request_ids)
            while not request_ids.isdisjoint(self.engine.unfinished_request_ids()):
                self.engine.step()


def _as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequestError(f"prompts must be a prompt or a list of prompts, got {prompts!r}")
    if prompts and not isinstance(prompts[0], (str, Mapping, Sequence)):
        return [cast(Prompt, prompts)]  # token ids
    return list(cast(Sequence[Prompt], prompts))


def _as_conversation_list(messages: object) -> list[Sequence[Message]]:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidRequestError(f"messages must be a conversation or a list of conversations, got {messages!r}")
    if messages and isinstance(messages[0], Mapping):
        return [messages]
    return list(messages)
