"""StructuredOutputsParams: the form that a request's output must have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from steploop.checks import check_bool, is_unicode
from steploop.errors import InvalidRequestError

MAX_SOURCE_BYTES = 128 * 1024
"""Longest schema, expression, grammar or list of choices."""

_FORMS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one form, with vLLM's names. Checked when made; whether it compiles shows when a request is added.

    Raises:
        InvalidRequestError: none or several, one of the wrong type, or longer than `MAX_SOURCE_BYTES`.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, or its text: the output is JSON that it describes."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: list[str] | None = None
    """Texts, one of which the output is."""
    grammar: str | None = None
    """A grammar in EBNF (GBNF); the output is a `root`."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """JSON in one line, with a space after each comma and colon and nowhere else."""

    def __post_init__(self) -> None:
        given = [name for name in _FORMS if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs must have exactly one of {', '.join(_FORMS)}, got {' and '.join(given) or 'none'}"
            )
        check_bool("disable_any_whitespace", self.disable_any_whitespace, error=InvalidRequestError)
        if self.json_object is not None:
            check_bool("json_object", self.json_object, error=InvalidRequestError)
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidRequestError(f"{name} must be a string, got {value!r}")
        if self.choice is not None:
            if not isinstance(self.choice, (list, tuple)) or not all(isinstance(text, str) for text in self.choice):
                raise InvalidRequestError(f"choice must be a list of strings, got {self.choice!r}")
            if not self.choice or not all(self.choice):
                raise InvalidRequestError(f"choice must have a text or more, none of them empty, got {self.choice!r}")
            object.__setattr__(self, "choice", list(self.choice))
        object.__setattr__(self, "json", self._schema_text())
        self._check_source()

    @property
    def source(self) -> tuple[str, str]:
        """What to compile: "json_schema", "regex" or "grammar", and its text."""
        if self.json is not None:
            return "json_schema", str(self.json)
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "grammar", "root ::= " + " | ".join(_quoted(text) for text in self.choice)
        if self.grammar is not None:
            return "grammar", self.grammar
        return "json_schema", '{"type": "object"}'

    def _schema_text(self) -> str | None:
        schema = self.json
        if schema is None:
            return None
        try:
            if isinstance(schema, str):
                schema = json.loads(schema)
            if not isinstance(schema, dict):
                raise InvalidRequestError(f"json must be a JSON schema, an object, got {self.json!r}")
            return json.dumps(schema)
        except (ValueError, TypeError, RecursionError) as error:
            if isinstance(error, InvalidRequestError):
                raise
            raise InvalidRequestError(f"json must be a JSON schema: {error}") from None

    def _check_source(self) -> None:
        text = self.source[1]
        if not is_unicode(text) or "\0" in text:
            raise InvalidRequestError("structured_outputs must be valid Unicode, without null characters")
        if (size := len(text.encode())) > MAX_SOURCE_BYTES:
            raise InvalidRequestError(f"structured_outputs must have at most {MAX_SOURCE_BYTES} bytes, got {size}")


def _quoted(text: str) -> str:
    """As a string of the grammar's language."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(char, char) for char in text) + '"'
