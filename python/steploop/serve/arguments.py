"""The options of `steploop serve`."""

from __future__ import annotations

import argparse

from steploop.engine_arguments import MODEL_HELP, add_full_engine_options


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds them."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="where to listen (default 127.0.0.1: this machine only)")
    server.add_argument("--port", type=int, default=8000, metavar="N", help="0: any free one (default 8000)")
    server.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name in requests (default: its file's)"
    )
    server.add_argument(
        "--api-key",
        metavar="KEY",
        help="require it of every request but /health, as `Authorization: Bearer KEY` (default: $STEPLOOP_API_KEY, "
        "which other users of the machine cannot see in the list of processes)",
    )
    server.add_argument(
        "--max-body-bytes", type=int, default=4 << 20, metavar="N", help="largest request body (default 4194304)"
    )
    server.add_argument(
        "--max-num-queued-requests",
        type=int,
        default=1024,
        metavar="N",
        help="requests that may wait to start; more get status 429; 0: no limit (default 1024)",
    )
    server.add_argument(
        "--max-num-queued-tokens", type=int, metavar="N", help="the same for the tokens of their prompts (default: any)"
    )
    server.add_argument(
        "--max-choices",
        type=int,
        default=64,
        metavar="N",
        help="answers to one HTTP request, its prompts times n (default 64)",
    )
    server.add_argument(
        "--drain-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long requests go on after SIGTERM or Ctrl-C; then they end with what they have (default 60)",
    )
    server.add_argument("--access-log", action="store_true", help="log each HTTP request to standard error")
    add_full_engine_options(parser)
