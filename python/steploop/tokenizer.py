"""Tokenizer: text to token ids and back, over transformers' tokenizers."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steploop.errors import InvalidRequestError, ModelLoadError
from steploop.weights.checkpoint import TokenizerFiles

Message = dict[str, Any]
"""One chat message: {"role": "user", "content": "..."}."""


class Tokenizer:
    """A thin layer over a transformers tokenizer, which is at hand as `hf`."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        # The Rust tokenizer itself decodes several times faster than transformers' wrapper.
        self._backend = getattr(hf, "backend_tokenizer", None)

    @classmethod
    def load(cls, files: TokenizerFiles) -> Tokenizer:
        """Loads a tokenizer; code that comes with it is never run.

        Raises:
            ModelLoadError: none there, damaged, or one that needs code of its own.
        """
        from transformers import AutoTokenizer

        try:
            if files.gguf_file is not None:
                hf = _load_from_gguf(Path(files.path) / files.gguf_file)
            else:
                hf = AutoTokenizer.from_pretrained(files.path, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers raises whatever its parsers meet
            raise ModelLoadError(f"the tokenizer of {files.path} cannot be loaded: {error}") from error
        return cls(hf)

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
        bos = self.hf.bos_token_id
        if bos is not None and token_ids[:2] == [bos, bos]:
            del token_ids[0]
        return token_ids

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered chat template, which holds every special token already."""
        return self._token_ids(text, add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation under the model's chat template.

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
        try:
            text: str = self.hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template may fail in as many ways as a program
            raise InvalidRequestError(f"the model's chat template does not accept these messages: {error}") from error
        return text

    def _token_ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the prompt must be valid Unicode: {error}") from None
        token_ids: list[int] = self.hf(text, add_special_tokens=add_special_tokens).input_ids
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `token_ids`; ids the tokenizer does not know (a padded vocabulary) give none."""
        if self._backend is not None:
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return text
        text = self.hf.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def _load_from_gguf(path: Path) -> Any:
    # Not AutoTokenizer, which first reads the whole file for a config it does not need here.
    from transformers import PreTrainedTokenizerFast

    # transformers prefers a tokenizer.json beside the GGUF file, be it another model's: show it the one file alone.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / path.name).symlink_to(path.resolve())
        return PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=path.name)
