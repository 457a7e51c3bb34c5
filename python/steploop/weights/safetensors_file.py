"""Reads one safetensors file without holding more of it in memory than one group of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from steploop.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

# Mapped pages count as resident until the file is closed, so it is closed after about this much.
_GROUP_SIZE_BYTES = 8 << 20

_ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class SafetensorsFile:
    """A checked safetensors header.

    Raises:
        ModelLoadError: no such file, or its header or length is wrong.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dtypes: dict[str, str] = {}
        """Tensor name -> dtype as the header spells it."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._groups: list[list[str]] = [[]]
        group_size_bytes = 0
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    view = file.get_slice(name)
                    self.dtypes[name] = view.get_dtype()
                    size_bytes = _ITEM_SIZES.get(self.dtypes[name], 1)
                    self.shapes[name] = tuple(view.get_shape())
                    size_bytes *= math.prod(self.shapes[name])
                    if self._groups[-1] and group_size_bytes + size_bytes > _GROUP_SIZE_BYTES:
                        self._groups.append([])
                        group_size_bytes = 0
                    self._groups[-1].append(name)
                    group_size_bytes += size_bytes
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelLoadError(f"{path} is not a whole safetensors file: {error}") from error

    def tensors(self, names: list[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor once, or those of these names, memory-mapped; valid until the next one is asked for.

        Raises:
            ModelLoadError: a tensor that is not floating point, or a file that changed since it was opened.
        """
        wrong = [f"{name} ({kind})" for name, kind in self.dtypes.items() if kind not in _ITEM_SIZES]
        if wrong:
            raise ModelLoadError(
                f"{self.path} holds tensors that are not float64, float32, float16 or bfloat16: {', '.join(wrong)}"
            )
        for group in self._groups if names is None else [names]:
            try:
                with safe_open(self.path, framework="pt") as file:
                    for name in group:
                        tensor = file.get_tensor(name)
                        yield name, tensor.float() if self.dtypes[name] == "F64" else tensor
                        del tensor
            except (SafetensorError, OSError, ValueError) as error:
                raise ModelLoadError(f"{self.path}: {error}") from error
