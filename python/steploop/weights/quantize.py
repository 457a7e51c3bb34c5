"""Weights in 8 and 4 bits: the formats of the native core, and the rotation that prepares weights for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

INT4_GROUP = 32
"""Inputs that share a scale and a minimum, of int4 weights."""
MAX_INPUT_GROUP = 256
MAX_ROTATION = 64


def input_group(in_features: int, *, int4: bool = False) -> int:
    """How many consecutive inputs share a scale, of quantised inputs, and of the rows of int8 weights.

    The largest multiple of 64 up to 256 that divides in_features rounded up to a multiple of 64. int4: 64, or 32 where
    64 does not divide in_features.
    """
    if int4:
        return INT4_GROUP if in_features % 64 else 64
    steps = -(-in_features // 64)
    return 64 * next(count for count in range(MAX_INPUT_GROUP // 64, 0, -1) if steps % count == 0)


def rotation_size(in_features: int) -> int:
    """How many consecutive inputs are rotated together: the largest power of two up to 64 that divides in_features."""
    return min(in_features & -in_features, MAX_ROTATION)


def rotate(weight: torch.Tensor) -> torch.Tensor:
    """Each run of `rotation_size` columns times an orthogonal Hadamard matrix; rotating again turns back.

    A linear layer whose weight and inputs are both rotated gives what it gave before, while a single large value is
    spread over the run, so that all are coded well (QuaRot: Ashkboos et al., 2024).
    """
    import torch

    size = rotation_size(weight.shape[-1])
    x: torch.Tensor = weight.reshape(-1, size)
    step = 1
    while step < size:
        pairs = x.view(-1, size // (2 * step), 2, step)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack((low + high, low - high), 2).view(-1, size)
        step *= 2
    rotated: torch.Tensor = x * size**-0.5
    return rotated.view(weight.shape)


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 of -127..127 [rows, columns], and scales float32 [rows, groups]: value = scale * code.

    A group are `input_group` columns; the last may have fewer. weight: float32.
    """
    import torch

    rows, columns = weight.shape
    size = input_group(columns)
    num_groups = -(-columns // size)
    padded = torch.nn.functional.pad(weight, (0, num_groups * size - columns))
    groups = padded.view(rows, num_groups, size)
    scales = groups.abs().amax(-1) / 127
    codes = (groups / scales.clamp(min=1e-30)[..., None]).round().to(torch.int8)
    return codes.view(rows, -1)[:, :columns].contiguous(), scales


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 of 0..15 [rows, columns], scales and minimums float16 [rows, groups]: value = scale * code + minimum.

    A group are `INT4_GROUP` columns, which must divide them. Of several ranges tried for each group the one is taken
    whose codes leave the least squared error, with the scale and minimum that fit those codes best.
    """
    import torch

    rows, columns = weight.shape
    groups = weight.float().reshape(-1, INT4_GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    codes, scales, minimums, errors = _fit_int4(groups, middle, half)
    ranges = [(middle, half * shrink) for shrink in (0.95, 0.9, 0.85, 0.8)]
    # That of GGUF's Q4_0, whose code 0 is the value of the largest magnitude and code 8 is zero.
    largest = torch.where(high > -low, high, low)
    ranges.append((largest / 16, largest.abs() * (15 / 16)))
    for middle, half in ranges:
        candidate = _fit_int4(groups, middle, half)
        better = candidate[3] < errors
        codes, scales, minimums, errors = (
            torch.where(better, new, old) for new, old in zip(candidate, (codes, scales, minimums, errors), strict=True)
        )
    shape = (rows, columns // INT4_GROUP)
    return codes.to(torch.uint8).view(rows, columns), scales.half().view(shape), minimums.half().view(shape)


def dequantize_int4(codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> torch.Tensor:
    """What `quantize_int4` gives, as float32 [rows, columns]."""
    groups = codes.float().view(*scales.shape, INT4_GROUP)
    values: torch.Tensor = groups * scales.float()[..., None] + minimums.float()[..., None]
    return values.view(codes.shape)


def _fit_int4(
    groups: torch.Tensor, middle: torch.Tensor, half: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes for the range middle - half .. middle + half, the scale and minimum that fit them best, and the error."""
    import torch

    steps = (half * (2 / 15)).clamp(min=1e-8)
    codes = ((groups - (middle - half)) / steps).round().clamp(0, 15)
    mean = codes.mean(-1, keepdim=True)
    spread = codes - mean
    variance = spread.square().sum(-1, keepdim=True)
    fitted = (spread * groups).sum(-1, keepdim=True) / variance.clamp(min=1)
    scales = torch.where(variance > 0, fitted, steps).half().float()
    minimums = (groups.mean(-1, keepdim=True) - scales * mean).half().float()
    return codes, scales, minimums, (scales * codes + minimums - groups).square().sum(-1, keepdim=True)
