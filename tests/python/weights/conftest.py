"""What tests of weights share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from steploop.weights import open_checkpoint


@pytest.fixture(scope="module")
def llama_weights(tiny_llama: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in open_checkpoint(tiny_llama).tensors(torch.float32)}
