"""Runs what a check consists of: stages of commands, each in a process of its own and with a time limit of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

TAIL_LINES = 25
WORST_FIRST = ("timed out", "failed", "passed", "skipped")


@dataclass
class Command:
    """A process to run. Lines of JSON that it writes to stdout are its results, also if it is stopped on the way."""

    name: str
    arguments: list[str]
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)
    ok_codes: tuple[int, ...] = (0,)
    read: Callable[[str], list[dict[str, Any]]] | None = None
    """Makes results of everything it wrote; default: the lines of JSON."""


@dataclass
class Stage:
    """Commands that belong together, run in turn. Later stages run whatever becomes of this one."""

    name: str
    limit_s: float
    least_s: float
    """Earlier stages leave at least so much time."""
    commands: Callable[[], list[Command]]
    """Called when its turn has come. Raises SkipStage where there is nothing to run, RuntimeError where it cannot."""
    is_required: bool = False
    """Where it fails, later stages are left out."""


class SkipStage(Exception):
    """There is nothing to run, and why."""


class Runner:
    """Runs stages and keeps a report, written anew after every command."""

    def __init__(
        self,
        report: dict[str, Any],
        summarise: Callable[[dict[str, Any]], dict[str, Any]],
        folder: Path,
        root: Path,
        total_s: float,
    ) -> None:
        self._report = report
        self._summarise = summarise
        self._stages: list[dict[str, Any]] = report.setdefault("stages", [])
        self._path = folder / "gpu_check.json"
        self._log_path = folder / "gpu_check.log"
        self._root = root
        self._deadline = time.monotonic() + total_s
        folder.mkdir(parents=True, exist_ok=True)
        self._log_path.write_text("")
        self.write()

    def write(self) -> None:
        """Writes the report as it is now, summed up; a reader never sees half of one."""
        self._report["summary"] = self._summarise(self._report)
        partial = self._path.with_suffix(".part")
        partial.write_text(json.dumps(self._report, indent=1) + "\n")
        partial.replace(self._path)

    def run(self, stages: list[Stage]) -> None:
        """Runs them all in order."""
        for index, stage in enumerate(stages):
            reserved = sum(later.least_s for later in stages[index + 1 :])
            self._run_stage(stage, min(stage.limit_s, self._deadline - time.monotonic() - reserved))
            if stage.is_required and self._stages[-1]["status"] == "failed":
                for later in stages[index + 1 :]:
                    reason = f"{stage.name} failed"
                    self._stages.append(new_entry(later.name) | {"status": "skipped", "reason": reason})
                self.write()
                return

    def _run_stage(self, stage: Stage, limit_s: float) -> None:
        entry = new_entry(stage.name)
        self._stages.append(entry)
        started = time.monotonic()
        deadline = started + limit_s
        try:
            commands = stage.commands()
        except SkipStage as reason:
            entry |= {"status": "skipped", "reason": str(reason)}
            commands = []
        except RuntimeError as error:
            entry |= {"status": "failed", "reason": str(error)}
            commands = []
        print(f"{stage.name} ...", flush=True)
        for command in commands:
            remaining = deadline - time.monotonic()
            if remaining < 1:
                result: dict[str, Any] = {"name": command.name, "status": "timed out", "reason": "no time was left"}
            else:
                result = self._run_command(command, min(command.limit_s, remaining))
            entry["commands"].append(result)
            entry["status"] = worst([part["status"] for part in entry["commands"]])
            entry["seconds"] = round(time.monotonic() - started, 1)
            self.write()
        self.write()
        print(f"{stage.name}: {entry['status']}, {entry['seconds']} s", entry.get("reason", ""), flush=True)

    def _run_command(self, command: Command, limit_s: float) -> dict[str, Any]:
        result: dict[str, Any] = {"name": command.name, "limit_s": round(limit_s, 1)}
        started = time.monotonic()
        # Files and not pipes: what a process wrote before it was stopped stays.
        with (
            tempfile.TemporaryFile("w+", errors="replace") as out,
            tempfile.TemporaryFile("w+", errors="replace") as err,
        ):
            try:
                result |= self._wait(command, limit_s, out, err)
            except OSError as error:
                result |= {"status": "failed", "reason": str(error)}
            result["seconds"] = round(time.monotonic() - started, 1)
            written, errors = (self._without_paths(_content(stream)) for stream in (out, err))
        with self._log_path.open("a") as log:
            log.write(f"==== {command.name}: {result['status']}, {result['seconds']} s\n{written}{errors}\n")
        result["results"] = (command.read or json_lines)(written + errors if command.read else written)
        if result["status"] != "passed":
            lines = [line for line in (written + "\n" + errors).splitlines() if line.strip() and line[0] != "{"]
            result["tail"] = lines[-TAIL_LINES:]
        return result

    def _wait(self, command: Command, limit_s: float, out: IO[str], err: IO[str]) -> dict[str, Any]:
        process = subprocess.Popen(
            command.arguments,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=self._root,
            env=os.environ | command.environment,
            start_new_session=True,  # so that what it starts can be ended with it
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return {"status": "timed out", "reason": f"ran past its limit of {limit_s:.0f} s"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code in command.ok_codes:
            return {"status": "passed", "exit_code": code}
        how = f"exit code {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        return {"status": "failed", "exit_code": code, "reason": how}

    def _without_paths(self, text: str) -> str:
        """A report is to be shared: where things lie on this machine is nobody's business."""
        return text.replace(str(self._root), ".")


def new_entry(name: str) -> dict[str, Any]:
    """What a report says of a stage."""
    return {"name": name, "status": "passed", "seconds": 0.0, "commands": []}


def worst(statuses: list[str]) -> str:
    """The status of a whole."""
    return min(statuses, key=WORST_FIRST.index) if statuses else "skipped"


def json_lines(text: str) -> list[dict[str, Any]]:
    """The lines of a text that are JSON objects; one that was cut off is none."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def _content(stream: IO[str]) -> str:
    stream.seek(0)
    return stream.read()
