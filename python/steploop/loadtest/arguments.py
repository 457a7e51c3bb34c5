"""The arguments of `steploop bench`. Imports nothing that takes time."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from steploop.engine_arguments import MODEL_HELP, add_full_engine_options
from steploop.workload.arguments import add_workload_arguments

DESCRIPTION = """Sends requests of a workload to MODEL in this process, or to the server at --url, each when it is due
however slow the answers are (an open loop), and reports what came back. All latencies are counted from when a request
was due, also where --max-concurrency or this client kept it from being sent then."""

EPILOG = """The exit code is 0 if any request was completed, even if others failed; 1 if every one failed, or after an
error; 130 after Ctrl-C, which ends the run and reports what there is, marked as incomplete.

Inter-token latency: tokens that came in one chunk share the wait before it; where the server says only at the end how
many tokens there were, they are spread evenly over its chunks with text, and those that were received at once count as
one. "Gap between chunks" is that wait itself. Chunks without text count for nothing; the first with text is the time to
first token."""


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds all of them."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("model", nargs="?", metavar="MODEL", help=f"test this in process: {MODEL_HELP}")
    server = parser.add_argument_group("server", "For a test over HTTP.")
    _add_server(server)
    _add_workload(parser.add_argument_group("workload", "What is drawn is the same for the same --seed."))
    _add_run(parser.add_argument_group("run and report"))
    num_before = len(parser._actions)
    add_full_engine_options(parser)
    # So that an option of the other kind of test is refused, not ignored.
    parser.set_defaults(
        server_options=_defaults(server._group_actions, without="url"),
        engine_options=_defaults(parser._actions[num_before:], without="tokenizer"),
    )


def _defaults(actions: Iterable[argparse.Action], *, without: str) -> dict[str, Any]:
    return {action.dest: action.default for action in actions if action.dest != without}


def _add_server(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--url", metavar="URL", help="of a server with OpenAI's interface, such as http://127.0.0.1:8000"
    )
    group.add_argument(
        "--endpoint",
        choices=["completions", "chat"],
        default="completions",
        help="which of its interfaces to use, streamed (default completions)",
    )
    group.add_argument(
        "--model", dest="served_model", metavar="NAME", help="the model to name (default: the first of /v1/models)"
    )
    group.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    group.add_argument(
        "--extra-body",
        metavar="JSON",
        help="an object whose fields are added to each request, or replace what it has (max_tokens, temperature, "
        "ignore_eos, stream_options); null leaves a field out",
    )


def _add_workload(group: argparse._ActionsContainer) -> None:
    add_workload_arguments(group)
    group.add_argument(
        "--prompt-format",
        choices=["token_ids", "text"],
        help="token_ids: drawn from the whole vocabulary; text: so many common words, of about a token each (default: "
        "text for chat and where the vocabulary's size is not known, else token_ids)",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="for token_ids (default: that of MODEL; with --url of --tokenizer, else what the server says)",
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of all requests (default 0)")


def _add_run(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="at most N requests in flight; the wait of others counts in their latencies",
    )
    group.add_argument(
        "--num-warmups",
        type=int,
        default=1,
        metavar="N",
        help="requests sent at once before each run, which must succeed and are not reported (default 1)",
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds a request may take from when it is sent; it has failed then (default 600)",
    )
    group.add_argument(
        "--slo",
        metavar="LIMITS",
        help="such as ttft=0.5,itl=0.05,tpot=0.04,e2e=10, in seconds: report the goodput, which counts completed "
        "requests within all of them. ttft: to the first text; itl: the longest wait between chunks; tpot: the mean "
        "for each token; e2e: to the end",
    )
    group.add_argument(
        "--json", metavar="FILE", help="write all figures, and those of each request, into FILE; -: standard output"
    )
    group.add_argument(
        "--plot",
        metavar="FILE",
        help="draw latencies and occupancy into a .svg, .png or .html FILE (needs matplotlib)",
    )
