"""Tokenizer: text to token ids and back, over transformers' tokenizers."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from steploop.checks import checked_int
from steploop.errors import InvalidRequestError, ModelLoadError
from steploop.weights.checkpoint import TokenizerFiles
from steploop.weights.folder import read_json

Message = dict[str, Any]
"""One chat message: {"role": "user", "content": "..."}."""

_SAVED_NAME = "steploop_tokenizer.json"


class Tokenizer:
    """A thin layer over a transformers tokenizer, which is at hand as `hf`."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        # The Rust tokenizer itself decodes several times faster than transformers' wrapper.
        self._backend: Any = getattr(hf, "backend_tokenizer", None)

    @classmethod
    def load(cls, files: TokenizerFiles) -> Tokenizer:
        """Loads a tokenizer; code that comes with it is never run.

        Raises:
            ModelLoadError: none there, damaged, or one that needs code of its own.
        """
        folder = Path(files.path)
        try:
            if files.gguf_file is not None:
                hf = _load_from_gguf(folder / files.gguf_file)
            elif (folder / _SAVED_NAME).is_file():
                return SavedTokenizer(folder)
            else:
                from transformers import AutoTokenizer

                hf = AutoTokenizer.from_pretrained(files.path, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers raises whatever its parsers meet
            raise ModelLoadError(f"the tokenizer of {files.path} cannot be loaded: {error}") from error
        return cls(hf)

    def save(self, folder: Path) -> None:
        """Saves it for `load`: as a SavedTokenizer, if that gives the same token ids.

        Raises:
            OSError: as writing does.
        """
        self.hf.save_pretrained(folder)
        if not (folder / "tokenizer.json").is_file():
            return
        token_ids = {"bos_token_id": self.bos_token_id, "eos_token_id": self.eos_token_id}
        (folder / _SAVED_NAME).write_text(json.dumps(token_ids), encoding="utf-8")
        texts = ["", " ", "\n\n  Hello, wörld 1234!\t日本 🙂\r\n", "".join(self.hf.all_special_tokens)]
        saved = SavedTokenizer(folder)
        if any(saved.encode(text + "x") != self.encode(text + "x") for text in texts) or any(
            saved.encode_rendered(text) != self.encode_rendered(text) for text in texts
        ):
            (folder / _SAVED_NAME).unlink()

    @property
    def hf(self) -> Any:
        """The transformers tokenizer."""
        return self._hf

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, where the tokenizer names one."""
        token_id = self.hf.bos_token_id
        return token_id if isinstance(token_id, int) else None

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text or a turn, where the tokenizer names one."""
        token_id = self.hf.eos_token_id
        return token_id if isinstance(token_id, int) else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens the model expects around one.

        A prompt that starts with the beginning-of-sequence token already, such as a rendered chat template, does not
        get a second one.
        """
        token_ids = self._token_ids(text, add_special_tokens=True)
        bos = self.bos_token_id
        if bos is not None and token_ids[:2] == [bos, bos]:
            del token_ids[0]
        return token_ids

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered chat template, which holds every special token already."""
        return self._token_ids(text, add_special_tokens=False)

    @property
    def chat_template(self) -> str:
        """The model's, that for tools where it has several; empty where it has none."""
        template = self.hf.chat_template or ""
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default") or ""
        return str(template)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: dict[str, Any] | None = None,
    ) -> str:
        """The text of a conversation under the model's chat template, which runs in a sandbox.

        Args:
            tools: Functions that the model may call: `{"type": "function", "function": {"name": ...}}`.
            continue_final_message: End within the last message, for the model to go on with it.
            template_variables: Others that the template knows, such as `enable_thinking`.

        Raises:
            InvalidRequestError: no template, or messages it does not accept.
        """
        if not isinstance(messages, Sequence) or not messages:
            raise InvalidRequestError(f"a conversation must be a list of at least one message, got {messages!r}")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise InvalidRequestError(
                    f'a message must be like {{"role": "user", "content": "..."}}, got {message!r}'
                )
        if not self.hf.chat_template:
            raise InvalidRequestError("this model has no chat template; write the whole prompt and use generate()")
        if tools and "tools" not in self.chat_template:
            tools = None  # it knows of none
        variables = template_variables or {}
        # Else a variable could set what is no variable: the template itself, for one.
        parameters = inspect.signature(self.hf.apply_chat_template).parameters
        if taken := set(variables) & {"messages", "conversations", *parameters}:
            raise InvalidRequestError(f"variables of a chat template must not be called {', '.join(sorted(taken))}")
        try:
            text: str = self.hf.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except Exception as error:  # a template may fail in as many ways as a program
            reason = error if isinstance(error, TemplateError) else type(error).__name__
            raise InvalidRequestError(f"the model's chat template does not accept these messages: {reason}") from error
        return text

    def _token_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the prompt must be valid Unicode: {error}") from None
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = self.hf(text, add_special_tokens=add_special_tokens).input_ids
        return token_ids

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of `token_ids`; ids the tokenizer does not know (a padded vocabulary) give none."""
        if self._backend is not None:
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return text
        options: dict[str, Any] = {"clean_up_tokenization_spaces": False}
        if not self.hf.is_fast:  # the fast ones know nothing of it
            options["spaces_between_special_tokens"] = spaces_between_special_tokens
        text = self.hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens, **options)
        return text


class SavedTokenizer(Tokenizer):
    """One that `Tokenizer.save` wrote, without transformers, which takes longer to import than a packed model to load.
    It is imported once `hf` is asked for: to render a chat template, among others."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Backend

        super().__init__(None)
        self._folder = folder
        self._backend = Backend.from_file(str(folder / "tokenizer.json"))
        self._backend.no_truncation()
        self._backend.no_padding()
        token_ids = read_json(folder / _SAVED_NAME)
        self._bos_token_id, self._eos_token_id = (
            None if value is None else checked_int(name, value, low=0, error=ModelLoadError)
            for name, value in ((name, token_ids.get(name)) for name in ("bos_token_id", "eos_token_id"))
        )

    @property
    def hf(self) -> Any:
        if self._hf is None:
            from transformers import PreTrainedTokenizerFast  # AutoTokenizer would import torch

            try:
                self._hf = PreTrainedTokenizerFast.from_pretrained(self._folder, local_files_only=True)
            except Exception as error:  # transformers raises whatever its parsers meet
                raise ModelLoadError(f"the tokenizer of {self._folder} cannot be loaded: {error}") from error
            self._backend = self._hf.backend_tokenizer  # so that tokens added there are known here
        return self._hf

    @property
    def bos_token_id(self) -> int | None:
        return self._bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self._eos_token_id

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        token_ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return token_ids


def _load_from_gguf(path: Path) -> Any:
    # Not AutoTokenizer, which first reads the whole file for a config it does not need here.
    from transformers import PreTrainedTokenizerFast

    # transformers prefers a tokenizer.json beside the GGUF file, be it another model's: show it the one file alone.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / path.name).symlink_to(path.resolve())
        return PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=path.name)
