"""The mutants that no check can notice, each with the reason: what they leave out is not needed for right results."""

from __future__ import annotations

from dataclasses import dataclass

from mutant_sources import Mutant


@dataclass(frozen=True)
class Redundant:
    """Known by what its lines read after the change, and before it where that is said."""

    file: str
    kind: str
    mutated: str
    reason: str

    def matches(self, mutant: Mutant) -> bool:
        return (self.file, self.kind, self.mutated) == (mutant.file, mutant.kind, mutant.mutated)


REDUNDANT: tuple[Redundant, ...] = ()
