"""Installs peers, each into an environment of its own, and converts the model for them. What is there is kept."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from catalog import ENVIRONMENTS, MODEL_FORMATS, Command
from script import say

EXPORT_HF = Path(__file__).parents[1] / "engine" / "export_hf.py"
MAX_LINES = 20
PIP = ("python", "-m", "pip", "--disable-pip-version-check")


class CommandError(Exception):
    """A command that failed; what it printed, without the paths of this machine."""

    def __init__(self, command: str, output: list[str]) -> None:
        super().__init__(f"{command} failed")
        self.command = command
        self.output = output
        """Its last lines."""


class Installer:
    """Peers and models in one folder. A failure is remembered, and raised again for whatever needs the same."""

    def __init__(self, folder: Path, model: Path) -> None:
        """`model`: a GGUF file or a model folder."""
        self._folder = folder.absolute()
        self._model = model.absolute()
        self._results: dict[str, Path | CommandError] = {}

    def environment(self, name: str) -> Path:
        """Folder of the environment, installed. Raises CommandError."""
        return self._once(name, lambda: self._install(name))

    def model(self, name: str) -> Path:
        """The model as "hf", a folder of Hugging Face's, or in one of MODEL_FORMATS. Raises CommandError."""
        return self._once(f"model {name}", lambda: self._convert(name))

    def _once(self, what: str, make: Callable[[], Path]) -> Path:
        if what not in self._results:
            try:
                self._results[what] = make()
            except CommandError as error:
                self._results[what] = error
        result = self._results[what]
        if isinstance(result, CommandError):
            raise result
        return result

    def _install(self, name: str) -> Path:
        recipe, folder, stamp = ENVIRONMENTS[name], self._folder / name, self._folder / f"{name}.installed"
        if stamp.is_file() and stamp.read_text() == repr(recipe):
            return folder
        say(f"installing {name}; {self._log(name)} tells how it goes ...")
        folder.mkdir(parents=True, exist_ok=True)
        self._log(name).unlink(missing_ok=True)
        self._run(name, (sys.executable, "-m", "venv", "."))
        self._run(name, (*PIP, "install", "-q", "--only-binary", ":all:", *recipe.packages))
        if recipe.unwanted:
            self._run(name, (*PIP, "uninstall", "-q", "-y", *recipe.unwanted))
        for command in recipe.build:
            self._run(name, command)
        stamp.write_text(repr(recipe))
        return folder

    def _convert(self, name: str) -> Path:
        if name == "hf" and self._model.is_dir():
            return self._model
        output = self._folder / "models" / self._model.stem / name
        if output.exists():
            return output
        partial = output.with_name(f"{name}.part")
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        if name == "hf":
            command: Command = (sys.executable, str(EXPORT_HF), str(partial), "--model", str(self._model))
            environment = None
        else:
            command, environment = MODEL_FORMATS[name].command, MODEL_FORMATS[name].environment
            if "{gguf}" in command and self._model.is_dir():
                raise CommandError(shlex.join(command), [f"needs a GGUF file, got the folder {self._model.name}"])
            paths = {"gguf": self._model, "output": partial} | ({"hf": self.model("hf")} if "{hf}" in command else {})
            command = tuple(part.format(**paths) for part in command)
            self.environment(environment)
        say(f"converting the model to {name} ...")
        self._run(environment, command)
        partial.rename(output)
        return output

    def _log(self, name: str | None) -> Path:
        return self._folder / f"{name or 'export'}.log"

    def _run(self, environment: str | None, command: Command) -> None:
        """In the environment's folder with its programs first; without one, as this process is."""
        variables, folder = dict(os.environ), self._folder
        if environment:
            folder = self._folder / environment
            variables["PATH"] = os.pathsep.join([str(folder / "bin"), variables.get("PATH", os.defpath)])
            variables.pop("PYTHONPATH", None)  # it must not find this one's packages
        with self._log(environment).open("a+") as log:
            begin = log.tell()
            try:
                # The program is looked for on this process's path otherwise.
                program = shutil.which(command[0], path=variables["PATH"]) or str(folder / command[0])
                done = subprocess.run(
                    [program, *command[1:]], cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT
                )
                if done.returncode == 0:
                    return
                failure = f"exit status {done.returncode}"
            except OSError as error:
                failure = str(error)
            log.seek(begin)
            lines = [*log.read().splitlines()[-MAX_LINES:], failure]
        raise CommandError(self._shown(shlex.join(command)), [self._shown(line) for line in lines])

    def _shown(self, text: str) -> str:
        """With names instead of where things lie."""
        for path in (self._folder, self._model, Path(sys.executable), EXPORT_HF):
            text = text.replace(str(path), path.name)
        return text
