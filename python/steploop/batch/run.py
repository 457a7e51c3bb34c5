"""run_batch: works through a batch, answers its lines as they finish, and goes on where an earlier run ended."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steploop.batch.job import BatchJob
from steploop.batch.line import JobKey
from steploop.batch.model_digest import model_digest
from steploop.batch.order import ORDERS
from steploop.batch.runner import BatchRun, BatchSummary
from steploop.checks import check_choice, checked_int
from steploop.config import EngineConfig
from steploop.engine import LLMEngine
from steploop.errors import InvalidArgumentError
from steploop.openai.model import ServedModel

_ANSWERS_DEPEND_ON = ("tokenizer", "revision", "dtype", "quantization", "kv_cache_dtype", "max_model_len")


def run_batch(
    model: str | Path,
    input_path: str | Path,
    output_path: str | Path,
    *,
    errors_path: str | Path | None = None,
    order: str = "grouped",
    seed: int = 0,
    served_model_name: str | None = None,
    max_choices: int = 64,
    trace: str | Path | None = None,
    use_tqdm: bool = True,
    **settings: Any,
) -> BatchSummary:
    """Answers a file of requests in OpenAI's batch format. Needs pydantic: `pip install 'steploop[batch]'`.

    Each answer is a line of the output, appended when it is there: the order is not that of the input. Called again
    after it was killed, with the same files and settings, it answers what is left. An answer does not depend on that,
    nor on the order, except for its `created` and the `cached_tokens` of its `usage`.

    Args:
        input_path: Lines like `{"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {...}}`.
        errors_path: For lines that cannot be answered: file, line and reason. No file is left if there are none.
            Default: beside the output, with the suffix ".errors.jsonl".
        order: In which lines start: "grouped", "input", "longest" or "prefix"; see `steploop.batch.order`.
        seed: Lines without a seed draw theirs from it and from their `custom_id`.
        served_model_name: What a body's `model` must be, if it has one. Default: the name of the model's file or
            folder. MODEL as it is given here is accepted as well.
        max_choices: Most answers to a line: its prompts times `n`.
        use_tqdm: Show a progress bar when standard error is a terminal.
        settings: As EngineConfig. Its limits of the queue are of no effect: few requests are queued at a time.

    Returns:
        What has been done.

    Raises:
        InvalidArgumentError: a setting that cannot be; a file that cannot be used, is in use by another process, or has
            answers of another job.
        KeyboardInterrupt: Ctrl-C. What is written stays; call it again for the rest.
        SteploopError: as LLMEngine, or an answer cannot be written.
    """
    config = EngineConfig(model=model, **settings)
    names = ModelNames.of(config, served_model_name)
    with open_job(input_path, output_path, errors_path, config=config, names=names, seed=seed) as job:
        return run_job(job, config, names, order=order, max_choices=max_choices, trace=trace, show_progress=use_tqdm)


@dataclass(frozen=True)
class ModelNames:
    """What bodies may call the model."""

    name: str
    """In answers, too."""
    given: str
    """As the user gave it."""

    @classmethod
    def of(cls, config: EngineConfig, served_model_name: str | None) -> ModelNames:
        """As `steploop serve` calls it, unless it is given a name."""
        given = str(config.model)
        return cls(served_model_name or Path(given).resolve().name.removesuffix(".gguf"), given)


def open_job(
    input_path: str | Path,
    output_path: str | Path,
    errors_path: str | Path | None,
    *,
    config: EngineConfig,
    names: ModelNames,
    seed: int,
) -> BatchJob:
    """The job of these files. Close it.

    Raises:
        InvalidArgumentError: as `run_batch`.
    """
    seed = checked_int("seed", seed, low=0, high=2**63 - 1)
    output = Path(output_path)
    if not output.name:
        raise InvalidArgumentError(f"the output must be a file, got {str(output)!r}")
    errors = output.with_name(output.name.removesuffix(".jsonl") + ".errors.jsonl")
    settings = {name: getattr(config, name) for name in _ANSWERS_DEPEND_ON}
    key = JobKey(seed, {"model": names.name, "files": model_digest(config.model), **settings})
    return BatchJob(Path(input_path), output, errors if errors_path is None else Path(errors_path), key)


def run_job(
    job: BatchJob,
    config: EngineConfig,
    names: ModelNames,
    *,
    order: str,
    max_choices: int,
    trace: str | Path | None,
    show_progress: bool,
) -> BatchSummary:
    """Does what is left of a job; without a model, if that is nothing.

    Raises:
        As `run_batch`.
    """
    check_choice("order", order, ORDERS)
    max_choices = checked_int("max_choices", max_choices, low=1)
    if job.complete:
        return BatchSummary(job.num_lines, job.num_before, num_errors=job.num_errors)
    config = dataclasses.replace(config, max_num_queued_requests=None, max_num_queued_tokens=None)
    with LLMEngine(config, trace=trace) as engine:
        served = ServedModel(engine, names.name, max_choices)
        return BatchRun(job, served, names.given, order, show_progress=show_progress).run()
