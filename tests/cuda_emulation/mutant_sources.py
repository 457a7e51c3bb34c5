"""Finds the places of the CUDA kernels that a small mistake could break, and says how each is broken.

There is no C++ parser here: kernels are written in one style, and regular expressions over code without comments find
what they need in it. Only device code is broken, and those checks of a launcher that refuse its arguments.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

KINDS = ("barrier", "shuffle", "mask", "index")

# Functions that take indices or addresses, and which of their arguments those are; by their number where it differs.
INDEX_ARGUMENTS: dict[str, tuple[int, ...] | dict[int, tuple[int, ...]]] = {
    "__ldg": (0,),
    "cache_row": (1, 3, 4),
    "copy": (0, 1),
    "cp_async_16": (0, 1),
    "find_groups": (0,),
    "head_index": (0, 1, 2),
    "load_fragments": (0, 1),
    "load_matrix_x4": (1,),
    "load_matrix_x4_transposed": (1,),
    "load_product": (2,),
    "load_product_column": (2,),
    "load_quad": (0, 1),
    "load_tile": (0, 1),
    "make_int2": (0, 1),
    "offset": (0, 1),
    "offset_at_step": (0, 1),
    "query_fragment": (0,),
    "store_pair": (1, 2),
    "store_quad": {3: (0, 1), 6: (2, 4)},
    "store_silu_mul": (1, 2),
    "thread_row": (0,),
    "token_of": (0, 1),
    "total_value": (0, 1),
}

_INTEGER = r"(?<!\w)(?:int|int32_t|int64_t)"
_POINTER = r"(?<!\w)(?:const )?[A-Za-z_]\w*\*(?: const)?"
_NUMBER = re.compile(r"[\d'.]+[uUlLf]*|0x[\da-f]+u?|true|false|nullptr")


@dataclass(frozen=True)
class Mutant:
    """One change of one source. Its key has no line number, so that it outlives changes elsewhere in the file."""

    file: str  # its name below csrc/kernels/cuda
    kind: str
    start: int  # of what is replaced, within the file
    end: int
    replacement: str
    line: int
    text: str  # the lines concerned, without comments, white space collapsed
    mutated: str  # the same lines after the change
    change: str  # both in one: ...[before -> after]...
    repeat: int = 0  # how many mutants before it in the file read the same

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return (self.file, self.kind, self.text, self.mutated, self.repeat)

    @property
    def id(self) -> str:
        return f"{self.file}-{self.kind}-{hashlib.sha256(repr(self.key).encode()).hexdigest()[:8]}"

    def apply(self, source: str) -> str:
        return source[: self.start] + self.replacement + source[self.end :]


def read_sources(folder: Path) -> dict[str, str]:
    """By name. ptx.cuh is not emulated but replaced."""
    paths = sorted([*folder.glob("*.cuh"), *folder.glob("*.cu")])
    return {path.name: path.read_text() for path in paths if path.name != "ptx.cuh"}


def find_mutants(file: str, source: str) -> list[Mutant]:
    """All of a file, in the order of their places."""
    code = Code(source)
    changes = {change for kind in KINDS for change in _FINDERS[kind](code)}
    seen: Counter[Mutant] = Counter()
    mutants = []
    for start, end, replacement, kind in sorted(changes):
        first, last = code.line_bounds(start, end)
        if kind == "barrier":  # they look alike: the lines around tell them apart
            before_it, after_it = code.strip(0, first)[1], code.strip(last, len(code.text))[0]
            first, last = code.line_bounds(before_it, before_it)[0], code.line_bounds(after_it, after_it)[1]
        before, old, after = code.text[first:start], code.text[start:end], code.text[end:last]
        versions = (before + new + after for new in (old, replacement, f"[{old} -> {replacement}]"))
        text, mutated, change = (" ".join(version.split()) for version in versions)
        mutant = Mutant(file, kind, start, end, replacement, source.count("\n", 0, start) + 1, text, mutated, change)
        like_it = replace(mutant, start=0, end=0, line=0)
        mutants.append(replace(mutant, repeat=seen[like_it]))
        seen[like_it] += 1
    return mutants


Change = tuple[int, int, str, str]  # start, end, replacement, kind


class Code:
    """A source with blanks where it has comments, preprocessor lines and what emulation has its own version of."""

    def __init__(self, source: str) -> None:
        def blank(match: re.Match[str]) -> str:
            return re.sub(r"[^\n]", " ", match[0])

        text = re.sub(r"//[^\n]*|/\*.*?\*/", blank, source, flags=re.S)
        text = re.sub(r"^#ifdef STEPLOOP_CUDA_EMULATION\n.*?^#endif", blank, text, flags=re.S | re.M)
        self.text = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.M)
        assert len(self.text) == len(source)
        self.device = list(self._device_functions())

    def _device_functions(self) -> Iterator[tuple[int, int]]:
        end = 0
        for match in re.finditer(r"\b__(?:device|global)__\b", self.text):
            if match.start() < end:
                continue
            place = match.end()
            while self.text[place] not in "{;":
                place = self.close(place) + 1 if self.text[place] in "([" else place + 1
            if self.text[place] == "{":
                end = self.close(place) + 1
                yield match.start(), end

    def in_device(self, place: int) -> bool:
        return any(start <= place < end for start, end in self.device)

    def device_matches(self, pattern: str) -> Iterator[re.Match[str]]:
        """In device code, and not in what the compiler evaluates."""
        for match in re.finditer(pattern, self.text):
            if self.in_device(match.start()) and not re.match(
                r"\s*(?:static\s+|inline\s+)*(?:constexpr|static_assert)\b",
                self.text[self.statement_start(match.start()) :],
            ):
                yield match

    def close(self, place: int) -> int:
        """Of the bracket at a place, its partner."""
        depth = 0
        for i in range(place, len(self.text)):
            depth += (self.text[i] in "([{") - (self.text[i] in ")]}")
            if depth == 0:
                return i
        raise AssertionError("a bracket without a partner")

    def open(self, place: int) -> int:
        depth = 0
        for i in range(place, -1, -1):
            depth += (self.text[i] in ")]}") - (self.text[i] in "([{")
            if depth == 0:
                return i
        raise AssertionError("a bracket without a partner")

    def split(self, start: int, end: int, separator: str) -> list[tuple[int, int]]:
        """The parts between separators that no bracket holds."""
        parts, first, i = [], start, start
        while i < end:
            if self.text[i] in "([{":
                i = self.close(i) + 1
            elif template := re.compile(r"(?<=\w)<[\w:, ]+>(?=\(|::)").match(self.text, i):
                i = template.end()
            elif self.text.startswith(separator, i):
                parts.append((first, i))
                i += len(separator)
                first = i
            else:
                i += 1
        return [self.strip(*part) for part in [*parts, (first, end)]]

    def arguments(self, opening: int) -> list[tuple[int, int]]:
        return self.split(opening + 1, self.close(opening), ",")

    def strip(self, start: int, end: int) -> tuple[int, int]:
        part = self.text[start:end]
        return start + len(part) - len(part.lstrip()), end - len(part) + len(part.rstrip())

    def statement_start(self, place: int) -> int:
        return max(self.text.rfind(mark, 0, place) for mark in ";{}") + 1

    def statement_end(self, place: int) -> int:
        """Past the statement that starts here."""
        while self.text[place].isspace():
            place += 1
        while self.text[place] not in "{;":
            place = self.close(place) + 1 if self.text[place] in "([" else place + 1
        return self.close(place) + 1 if self.text[place] == "{" else place + 1

    def expression_end(self, place: int) -> int | None:
        """Up to a semicolon; None if a bracket closes first."""
        while self.text[place] not in ";)}]":
            place = self.close(place) + 1 if self.text[place] in "([{" else place + 1
        return place if self.text[place] == ";" else None

    def line_bounds(self, start: int, end: int) -> tuple[int, int]:
        last = self.text.find("\n", end)
        return self.text.rfind("\n", 0, start) + 1, len(self.text) if last < 0 else last

    def is_constant(self, start: int, end: int) -> bool:
        """What the compiler knows: constants, and shapes given as template arguments."""
        names = re.findall(r"[A-Za-z_]\w*", self.text[start:end])
        return all(re.fullmatch(r"k[A-Z]\w*|\w*Shape|true|false", name) for name in names)


# ---- Barriers: left out, or waiting for one group less ---------------------------------------------------------------


def _barriers(code: Code) -> Iterator[Change]:
    for match in code.device_matches(r"\b(?:__syncthreads|__syncwarp|cp_async_commit|cp_async_wait<[^>]*>)\(\w*\)"):
        yield match.start(), match.end(), f"/* {match[0]} */", "barrier"
    for match in code.device_matches(r"\bcp_async_wait<([^>]*)>"):
        yield match.start(1), match.end(1), f"{match[1]} + 1", "barrier"


# ---- Shuffles: another lane, also for the rows of ldmatrix and for what a lane's number stands for -------------------


def _shuffles(code: Code) -> Iterator[Change]:
    for match in code.device_matches(r"\b__shfl_\w*sync\("):  # 4: the same lanes never meet by another way
        start, end = code.arguments(match.end() - 1)[2]
        yield start, end, f"({code.text[start:end]}) ^ 4", "shuffle"
    for match in code.device_matches(r"\b(lane_?|this_lane\(\)) ([/%]) (\w+)"):
        lane, operator, divisor = match.groups()
        other = divisor if operator == "/" else "1"
        yield match.start(), match.end(), f"({lane} ^ {other}) {operator} {divisor}", "shuffle"


# ---- Masks: a condition or a part of it, as if it were not there -----------------------------------------------------


def _masks(code: Code) -> Iterator[Change]:
    for start, end, values in _conditions(code):
        for change in _without_parts(code, start, end, values):
            yield (*change, "mask")
    for match in code.device_matches(r"\b(?:std::)?(?:min|max)(?:<\w+>)?\("):
        closing = code.close(match.end() - 1)
        if not code.is_constant(match.end(), closing):
            for start, end in code.arguments(match.end() - 1):
                yield match.start(), closing + 1, f"({code.text[start:end]})", "mask"


def _without_parts(code: Code, start: int, end: int, values: tuple[str, ...]) -> Iterator[tuple[int, int, str]]:
    """Each operand of && is held to be true, each of || false; a condition that is whole takes the values."""
    if code.text[start] == "(" and code.close(start) == end - 1:
        start, end = code.strip(start + 1, end - 1)
    for operator, value in (("||", "false"), ("&&", "true")):
        parts = code.split(start, end, operator)
        if len(parts) > 1:
            for part in parts:
                yield from _without_parts(code, *part, (value,))
            return
    if not code.is_constant(start, end):
        yield from ((start, end, value) for value in values)


def _conditions(code: Code) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    """With what stands for a whole condition that is dropped."""
    for match in re.finditer(r"\bif \(", code.text):
        closing = code.close(match.end() - 1)
        leaves = re.match(r"\s*(?:\{\s*)?(return|continue|break)\b\s*([^;]*)", code.text[closing + 1 :])
        if not code.in_device(match.start()):
            if not leaves or leaves[2] not in ("cudaErrorInvalidValue", "false"):
                continue
        values: tuple[str, ...] = ("false",) if leaves else ("true",)
        if re.match(r"\s*else\b", code.text[code.statement_end(closing + 1) :]):
            values = ("true", "false")
        yield *code.strip(match.end(), closing), values
    for match in code.device_matches(r"\?"):
        start = _ternary_start(code, match.start())
        yield *code.strip(start, match.start()), ("true", "false")
    for match in code.device_matches(r"\bcp_async_16\("):
        arguments = code.arguments(match.end() - 1)
        yield *arguments[2], ("true",)
    for match in re.finditer(r"\bbool \w+ = |\w+ &= (?=[^;]*[<>])", code.text):
        end = code.text.find(";", match.end())
        first, *others = code.split(match.end(), end, ",")
        if "?" not in code.text[first[0] : end] and not _NUMBER.fullmatch(code.text[slice(*first)]):
            yield *first, ("true",)
        for start, stop in others:  # const bool a = ..., b = ...;
            name = re.match(r"\w+ = ", code.text[start:stop])
            assert name
            yield start + name.end(), stop, ("true",)
    for match in re.finditer(r"\breturn (?=[^;]*(?:&&|\|\|))", code.text):
        end = code.text.find(";", match.end())
        if "{" not in code.text[match.end() : end] and "?" not in code.text[match.end() : end]:
            yield match.end(), end, ()


def _ternary_start(code: Code, place: int) -> int:
    """Of the condition that ends at a question mark."""
    i = place - 1
    while True:
        character = code.text[i]
        if character in ")]}":
            i = code.open(i)
        elif character in ",;([{?":
            break
        elif character == ":" and ":" not in (code.text[i - 1], code.text[i + 1]):
            break
        elif character == "=" and code.text[i - 1] not in "=!<>" and code.text[i + 1] != "=":
            break
        elif code.text.startswith("return ", i) and not code.text[i - 1].isalnum():
            return i + len("return ")
        i -= 1
    return i + 1


# ---- Indices: one further --------------------------------------------------------------------------------------------


def _indices(code: Code) -> Iterator[Change]:
    for start, end in _index_expressions(code):
        start, end = code.strip(start, end)
        yield start, end, f"({code.text[start:end]}) + 1", "index"


def _index_expressions(code: Code) -> Iterator[tuple[int, int]]:
    for match in code.device_matches(r"(?<=[\w\])])\["):
        if not _is_declaration(code, match.start()):
            yield match.end(), code.close(match.start())
    for name, which in INDEX_ARGUMENTS.items():
        for match in code.device_matches(rf"\b{name}(?:<\w+>)?\("):
            arguments = code.arguments(match.end() - 1)
            if any(re.fullmatch(r"(?:const )?[\w:]+[&*]* [&*]?\w+", code.text[slice(*part)]) for part in arguments):
                continue  # the function itself
            indices = which.get(len(arguments), ()) if isinstance(which, dict) else which
            yield from (arguments[i] for i in indices if i < len(arguments))
    for match in code.device_matches(r"\breinterpret_cast<[\w ]+\*>\("):
        arguments = code.arguments(match.end() - 1)
        if len(code.split(*arguments[0], " + ")) > 1:
            yield arguments[0]
    yield from _offsets(code)


def _is_declaration(code: Code, bracket: int) -> bool:
    """Of an array, rather than an access to one."""
    before = code.text[bracket - 1]
    if before == "]":
        return _is_declaration(code, code.open(bracket - 1))
    if before == ")":
        return re.fullmatch(r"\(&\w+\)", code.text[code.open(bracket - 1) : bracket]) is not None
    start = max(code.text.rfind(mark, 0, bracket) for mark in ";{}()") + 1
    declarator = code.text[start:bracket].strip()
    if code.text[start - 1] == "}" and re.fullmatch(r",\s*\w+", declarator):
        return True  # float a[4] = {}, b[4] = {};
    one = re.fullmatch(r"(?:const\s+)?(\w[\w:]*)\s+(?:\w+(?:\[[^\]]*\])+\s*,\s*)*\w+", declarator)
    return one is not None and one[1] not in ("return", "else")


def _offsets(code: Code) -> Iterator[tuple[int, int]]:
    """What pointers and whole numbers of 32 or 64 bits with a sign are set to: amounts are unsigned."""
    names: set[str] = set()
    for match in re.finditer(rf"(?:{_INTEGER}|{_POINTER}) (\w+(?:(?: = [^,;(){{}}]*)?, \*?\w+)*)", code.text):
        names |= set(re.findall(r"(?:^|, \*?)(\w+)", match[1]))
    found: list[tuple[int, int | None]] = []
    for match in code.device_matches(rf"(?:{_INTEGER}|{_POINTER}) (?=\w+ =)"):
        if code.text[code.statement_start(match.start()) : match.start()].strip().endswith("("):
            continue  # the variable of a loop
        end = code.expression_end(match.end())
        assert end
        for start, stop in code.split(match.end(), end, ","):
            name = re.match(r"\*?\w+ = ", code.text[start:stop])
            if name:
                found.append((start + name.end(), stop))
    for match in code.device_matches(r"(?:^|(?<=[;{})\s]))(\w+) \+?= "):
        before = code.text[code.statement_start(match.start()) : match.start()].strip()
        if match[1] in names and (not before or before.endswith(")") or before == "else"):
            found.append((match.end(), code.expression_end(match.end())))
    for start, end in code.device:
        header = code.text[start : code.text.find("{", start)]
        if re.search(rf"__ (?:{_INTEGER}|{_POINTER}) \w+\(", header):
            for match in re.finditer(r"\breturn (?=[^{\[])", code.text[start:end]):
                found.append((start + match.end(), code.expression_end(start + match.end())))
    for start, stop in found:
        if stop and not _NUMBER.fullmatch(code.text[start:stop]) and not code.is_constant(start, stop):
            yield start, stop


_FINDERS = {"barrier": _barriers, "shuffle": _shuffles, "mask": _masks, "index": _indices}
