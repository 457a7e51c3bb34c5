"""Prints what the machine is as a line of JSON: device, driver, compiler, packages."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from machine import describe_machine
from packages import find_sanitizer, missing_packages

PACKAGES = ("torch", "transformers", "accelerate", "triton", "flash-attn", "scikit-build-core", "pybind11", "cmake")
SMI_FIELDS = ("name", "driver_version", "memory.total", "memory.used", "clocks.max.sm", "clocks.max.memory")


def main() -> None:
    """Prints it."""
    about: dict[str, Any] = {"name": "environment", "python": platform.python_version()} | describe_machine()
    about["date"] = datetime.now(timezone.utc).date().isoformat()
    about["commit"] = _output("git", "rev-parse", "HEAD").strip() or None
    about["packages"] = {name: version for name in PACKAGES if (version := _version(name))}
    about["missing_packages"] = missing_packages()
    about["nvcc"] = _first_match(r"release ([\d.]+)", _output("nvcc", "--version"))
    about["compute_sanitizer"] = find_sanitizer() is not None
    if smi := _output("nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"):
        about["nvidia_smi"] = dict(zip(SMI_FIELDS, map(str.strip, smi.splitlines()[0].split(",")), strict=False))
    about["torch_device"] = _torch_device()
    print(json.dumps(about))
    if about["torch_device"] is None and "STEPLOOP_CUDA_LIBRARY" not in os.environ:
        sys.exit("torch sees no CUDA device; with --emulate DIR the check runs without one")


def _torch_device() -> dict[str, Any] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=15).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _first_match(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


if __name__ == "__main__":
    main()
