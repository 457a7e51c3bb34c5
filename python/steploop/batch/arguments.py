"""The arguments of `steploop batch`. Imports nothing that takes time."""

from __future__ import annotations

import argparse

from steploop.engine_arguments import MODEL_HELP, add_full_engine_options

DESCRIPTION = """Answers a file of requests in OpenAI's batch format. Each answer is appended to OUTPUT.jsonl when it is
there, so the order is not that of the input. The same command, given again after it was killed or interrupted, answers
what is left: no answer that was written is lost, repeated or computed again."""

EPILOG = """Input lines: {"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {...}}, or with
the url /v1/completions; bodies are those that `steploop serve` takes, but for "stream". "model" may be left out. Output
lines: {"id": "batch_req_...", "custom_id": "...", "response": {"status_code": 200, "request_id": "...", "body": {...}},
"error": null}. Lines that cannot be answered are in the errors file, with file, line and reason, and stop nothing; mend
them in the input and give the command again, or, to try the same lines again, remove the errors file.

An answer depends on its line, the model and --seed alone, but for "created" and "cached_tokens". An OUTPUT.jsonl that
has answers to other lines, or of other settings, is refused.

The exit code is 0 if every line has an answer; 1 if any line is in the errors file, or after an error; 130 after
Ctrl-C."""


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all of them."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("input", metavar="INPUT.jsonl", help="requests, one a line")
    parser.add_argument("output", metavar="OUTPUT.jsonl", help="a new file for answers, or that of an earlier run")
    job = parser.add_argument_group("job")
    job.add_argument(
        "--errors", metavar="FILE", help="for lines that cannot be answered (default: OUTPUT.errors.jsonl)"
    )
    job.add_argument(
        "--order",
        # Of steploop.batch.order, which takes time to import.
        choices=["grouped", "input", "longest", "prefix"],
        default="grouped",
        help="which lines start first. prefix: lines that begin with the same text are neighbours, so that the prefix "
        "cache has it; longest: those with the largest max_tokens (without one: 1024 in a chat, 16 in a completion), "
        "so that none of them runs on alone at the end; grouped: as prefix, the groups with the longest first "
        "(default grouped)",
    )
    job.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="lines without a seed of their own draw it from N and their custom_id (default 0)",
    )
    job.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="what a body's model must be, if it has one (default: the name of MODEL's file, or MODEL)",
    )
    job.add_argument(
        "--max-choices",
        type=int,
        default=64,
        metavar="N",
        help="answers to one line, its prompts times n (default 64)",
    )
    add_full_engine_options(parser)
