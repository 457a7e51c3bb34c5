"""Workloads: how long prompts and outputs are, when requests arrive, and what the prompts say; drawn from a seed.

    lengths = (parse_lengths("uniform:32:256"), parse_lengths("exponential:64:256:clip"))
    workload = draw_workload(100, lengths=lengths, arrivals=parse_arrivals("poisson:4"), seed=0)
    workload.requests[0].num_prompt_tokens, workload.summary()

`lengths` and `arrivals` are what can be drawn, `specs` the text they are written in, `files` reads what was recorded,
`draw` puts a workload together, `prompts` fills it and `summary` describes it. No engine and no clock in here.
"""

from __future__ import annotations

from steploop.workload.arrivals import Arrivals, Burst, Gamma, RecordedArrivals
from steploop.workload.draw import Workload, WorkloadRequest, draw_workload
from steploop.workload.files import read_arrivals, read_lengths
from steploop.workload.lengths import Cap, Exponential, Fixed, Lengths, LogNormal, RecordedLengths, Uniform
from steploop.workload.prompts import PromptMaker
from steploop.workload.specs import parse_arrivals, parse_lengths

__all__ = [
    "Arrivals",
    "Burst",
    "Cap",
    "Exponential",
    "Fixed",
    "Gamma",
    "Lengths",
    "LogNormal",
    "PromptMaker",
    "RecordedArrivals",
    "RecordedLengths",
    "Uniform",
    "Workload",
    "WorkloadRequest",
    "draw_workload",
    "parse_arrivals",
    "parse_lengths",
    "read_arrivals",
    "read_lengths",
]
