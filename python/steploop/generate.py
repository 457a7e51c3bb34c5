"""The command `steploop generate`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steploop.engine import LLMEngine
from steploop.engine_arguments import engine_config
from steploop.errors import InvalidArgumentError, InvalidRequestError
from steploop.outputs import CompletionOutput, RequestOutput
from steploop.prompts import Prompt
from steploop.sampling_params import SamplingParams
from steploop.structured_outputs import StructuredOutputsParams
from steploop.text import printable, shorten

_TITLE_LENGTH = 72


def run_generate(arguments: argparse.Namespace) -> None:
    """Runs the command; the prompts' answers go to standard output.

    Raises:
        SteploopError: anything the user can mend.
    """
    params = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        bad_words=arguments.bad_word,
        stop=arguments.stop,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        min_tokens=arguments.min_tokens,
        stop_token_ids=arguments.stop_token_id,
        ignore_eos=arguments.ignore_eos,
        logprobs=arguments.logprobs,
        structured_outputs=_structured_outputs(arguments),
        n=arguments.n,
    )
    texts = read_prompts(arguments)
    with LLMEngine(engine_config(arguments), trace=arguments.trace) as engine:
        prompts = [_as_prompt(engine, text, arguments) for text in texts]
        # Every prompt is checked before the first is run.
        requests = [engine.prepare_request(str(index), prompt, params) for index, prompt in enumerate(prompts)]
        for request in requests:
            engine.submit(request)
        if arguments.json:
            _print_json(engine, texts)
        elif len(texts) == params.n == 1:
            _stream(engine)
        else:
            _print_blocks(engine, texts)


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """Prompts from the command line, else from --file, else from standard input.

    Raises:
        InvalidArgumentError: none there, or an unreadable file.
    """
    if arguments.prompts and arguments.file is not None:
        raise InvalidArgumentError("give prompts on the command line or in --file, not both")
    if arguments.system is not None and not arguments.chat:
        raise InvalidArgumentError("--system needs --chat")
    if arguments.prompts:
        return list(arguments.prompts)
    if arguments.file is None and sys.stdin.isatty():
        raise InvalidArgumentError("there is no prompt: give PROMPT or --file, or pipe prompts into standard input")
    try:
        # "-sig": editors on Windows begin a file with a byte order mark.
        if arguments.file is not None:
            content = Path(arguments.file).read_text(encoding="utf-8-sig")
        else:
            content = sys.stdin.buffer.read().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"prompts cannot be read from {arguments.file or 'standard input'}: {error}"
        ) from None
    # Not splitlines(), which also splits at characters that belong to a line.
    lines = [line.rstrip("\r") for line in content.split("\n")]
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise InvalidArgumentError(f"{arguments.file or 'standard input'} holds no prompt")
    return prompts


def _structured_outputs(arguments: argparse.Namespace) -> StructuredOutputsParams | None:
    forms = {
        "json": arguments.json_schema,
        "regex": arguments.regex,
        "choice": arguments.choice,
        "grammar": arguments.grammar,
    }
    if all(value is None for value in forms.values()):
        return None
    return StructuredOutputsParams(**forms)


def _as_prompt(engine: LLMEngine, text: str, arguments: argparse.Namespace) -> Prompt:
    if not arguments.chat:
        return text
    if engine.tokenizer is None:
        raise InvalidRequestError(f"{arguments.model} has no tokenizer, so no chat template")
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    rendered = engine.tokenizer.render_chat([*system, {"role": "user", "content": text}])
    return {"prompt": rendered, "prompt_token_ids": engine.tokenizer.encode_rendered(rendered)}


def _stream(engine: LLMEngine) -> None:
    shown = printable if sys.stdout.isatty() else str
    length = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            text = output.outputs[0].text
            sys.stdout.write(shown(text[length:]))
            sys.stdout.flush()
            length = len(text)
    sys.stdout.write("\n")


def _print_blocks(engine: LLMEngine, texts: list[str]) -> None:
    shown = printable if sys.stdout.isatty() else str
    for index, output in _finished(engine):
        for completion in output.outputs:
            number = f"{index + 1}/{len(texts)}"
            if len(output.outputs) > 1:
                number += f", sample {completion.index + 1}/{len(output.outputs)}"
            print(f"--- {number}: {shorten(texts[index], _TITLE_LENGTH)}")
            print(shown(completion.text), end="\n\n", flush=True)


def _print_json(engine: LLMEngine, texts: list[str]) -> None:
    for index, output in _finished(engine):
        for completion in output.outputs:
            record = _as_json(index, texts[index], output, completion)
            print(json.dumps(record, ensure_ascii=False), flush=True)


def _finished(engine: LLMEngine) -> Iterator[tuple[int, RequestOutput]]:
    """(number of the prompt, its output) as each ends."""
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                yield int(output.request_id), output


def _as_json(index: int, text: str, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    return {
        "index": index,
        "sample": completion.index,
        "prompt": text,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "cumulative_logprob": completion.cumulative_logprob,
        "logprobs": completion.logprobs
        and [
            {str(token_id): dataclasses.asdict(logprob) for token_id, logprob in entry.items()}
            for entry in completion.logprobs
        ],
        "metrics": dataclasses.asdict(output.metrics),
    }
