"""Simulation: what the scheduler and block manager that serve would do on some device, on a virtual clock.

    deployment = Deployment(model=find_model("llama-3-8b"), device=find_device("H100"))
    workload = draw_workload(1000, lengths=lengths, arrivals=arrivals)
    result = simulate(workload, deployment, EngineConfig(model="llama-3-8b", max_num_seqs=256))
    summarize(result)["throughput"]

`devices` and `models` have the presets, `costs` what a step of a model costs on a device, `simulation` runs, `figures`
and `plot` say what came of it; `calibration` measures this machine, and `fit` finds its factors. `arguments` are the
command line's options, `settings` what they ask for, `command` and `calibrate_command` the commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steploop.lazy import lazy_names

if TYPE_CHECKING:
    from steploop.simulation.calibration import Calibration, calibrate
    from steploop.simulation.costs import Deployment
    from steploop.simulation.devices import DEVICES, Device, Efficiencies, find_device
    from steploop.simulation.figures import summarize
    from steploop.simulation.models import MODELS, ModelShape, find_model
    from steploop.simulation.simulation import SimulationResult, simulate

# When they are used, so that `arguments` can be read without numpy.
__getattr__ = lazy_names(
    __name__,
    {
        "calibration": ("Calibration", "calibrate"),
        "costs": ("Deployment",),
        "devices": ("DEVICES", "Device", "Efficiencies", "find_device"),
        "figures": ("summarize",),
        "models": ("MODELS", "ModelShape", "find_model"),
        "simulation": ("SimulationResult", "simulate"),
    },
)


__all__ = [
    "DEVICES",
    "MODELS",
    "Calibration",
    "Deployment",
    "Device",
    "Efficiencies",
    "ModelShape",
    "SimulationResult",
    "calibrate",
    "find_device",
    "find_model",
    "simulate",
    "summarize",
]
