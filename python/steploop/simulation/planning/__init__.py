"""Planning: the smallest deployment that meets a service-level objective, by simulating what may do.

    settings = Settings(deployment=deployment, engine=EngineConfig(model="llama-3-8b"), source=source)
    found = plan(settings, rate=20, slo={"ttft": 0.5, "itl": 0.05})
    found.chosen, found.headroom, found.breaking

`search` is the whole of it: `trials` simulates and judges, `layouts` searches over devices, `limits` and `kv_budget`
over the engine's settings, `breaking` says what fails first. `command` is `steploop plan`.
"""

from __future__ import annotations

from steploop.simulation.planning.breaking import Breaking
from steploop.simulation.planning.kv_budget import KvBudget
from steploop.simulation.planning.layouts import Degree
from steploop.simulation.planning.limits import LoadLimit
from steploop.simulation.planning.search import Plan, plan
from steploop.simulation.planning.trials import Layout, Limits, Objective, Trial

__all__ = ["Breaking", "Degree", "KvBudget", "Layout", "Limits", "LoadLimit", "Objective", "Plan", "Trial", "plan"]
