"""Simulation: what the scheduler and block manager that serve would do on some device, on a virtual clock.

    deployment = Deployment(model=find_model("llama-3-8b"), device=find_device("H100"))
    workload = draw_workload(1000, lengths=lengths, arrivals=arrivals)
    result = simulate(workload, deployment, EngineConfig(model="llama-3-8b", max_num_seqs=256))
    summarize(result)["throughput"]

`devices` and `models` have the presets, `costs` what a step of a model costs on a device, `simulation` runs, `figures`
and `plot` say what came of it; `calibration` measures this machine, `planning` searches for what meets an objective.
"""

from __future__ import annotations

from steploop.simulation.costs import Deployment
from steploop.simulation.devices import DEVICES, Device, Efficiencies, find_device
from steploop.simulation.figures import summarize
from steploop.simulation.models import MODELS, ModelShape, find_model
from steploop.simulation.simulation import SimulationResult, simulate

__all__ = [
    "DEVICES",
    "MODELS",
    "Deployment",
    "Device",
    "Efficiencies",
    "ModelShape",
    "SimulationResult",
    "find_device",
    "find_model",
    "simulate",
    "summarize",
]
