"""The command `steploop batch`."""

from __future__ import annotations

import argparse
import sys

from steploop.checks import check_trace_path
from steploop.engine_arguments import engine_config
from steploop.errors import InvalidArgumentError

try:
    from steploop.batch.job import TODO, BatchJob
    from steploop.batch.run import ModelNames, open_job, run_job
    from steploop.batch.runner import BatchSummary
except ImportError as error:
    if not (error.name or "").startswith("pydantic"):
        raise
    raise InvalidArgumentError(f"batch needs a further package ({error}): pip install 'steploop[batch]'") from None

EXIT_SOME_FAILED = 1


def run_batch_command(arguments: argparse.Namespace) -> int:
    """Runs the command; a summary goes to standard output.

    Returns:
        0 if every line has an answer, 1 if not.

    Raises:
        SteploopError: anything the user can mend.
        KeyboardInterrupt: Ctrl-C; standard error says how far it came.
    """
    config = engine_config(arguments)
    names = ModelNames.of(config, arguments.served_model_name)
    with open_job(
        arguments.input, arguments.output, arguments.errors, config=config, names=names, seed=arguments.seed
    ) as job:
        if arguments.trace is not None:
            job.check_other(arguments.trace, "the trace")
            check_trace_path(arguments.trace)
        try:
            summary = run_job(
                job,
                config,
                names,
                order=arguments.order,
                max_choices=arguments.max_choices,
                trace=arguments.trace,
                show_progress=True,
            )
        except KeyboardInterrupt:
            left = f"{job.count(TODO)} of {job.num_lines} lines are left"
            print(f"steploop: interrupted: {left}; the same command goes on with them", file=sys.stderr)
            raise
        print(_in_words(job, summary))
    return EXIT_SOME_FAILED if summary.num_errors else 0


def _in_words(job: BatchJob, summary: BatchSummary) -> str:
    text = f"{summary.num_lines} lines: {summary.num_before + summary.num_answered} answered"
    if summary.num_before:
        text += f", {summary.num_before} of them before"
    if summary.num_errors:
        text += f"; {summary.num_errors} could not be, see {job.errors.path}"
    if summary.num_answered:
        rate = summary.num_output_tokens / max(summary.duration, 1e-9)
        text += (
            f"; {summary.num_output_tokens} tokens in {summary.duration:.1f} s ({rate:.0f} tokens/s), for prompts of "
            f"{summary.num_prompt_tokens}, of which the prefix cache had {summary.num_cached_tokens}"
        )
    return text
