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


REDUNDANT = (
    Redundant(
        "rope_kv_write.cu",
        "mask",
        "const int64_t block = false ? slot >> block_shift : slot / kv.block_size;",
        "the shift is a faster division by the same number",
    ),
    Redundant(
        "rope_kv_write.cu",
        "mask",
        "if (true) slot = p.slot_mapping[token];",
        "queries do not use the slot; the condition saves reading it",
    ),
    Redundant(
        "rope_kv_write.cu",
        "mask",
        "if (active && true) {",
        "values do not use the angle; the condition saves reading it",
    ),
    Redundant(
        "silu_mul.cu",
        "mask",
        "const int32_t run = false ? column >> group_shift : column / p.group;",
        "the shift is a faster division by the same number",
    ),
    Redundant(
        "silu_mul.cu",
        "mask",
        "if (p.num_rows < 0 || p.size < 0 || false) return cudaErrorInvalidValue;",
        "the next line refuses it too: a group is a multiple of 8 and divides the size",
    ),
)
