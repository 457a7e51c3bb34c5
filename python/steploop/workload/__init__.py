"""Workloads: how long prompts and outputs are, when requests arrive, and what the prompts say; drawn from a seed.

    lengths = (parse_lengths("uniform:32:256"), parse_lengths("exponential:64:256:clip"))
    workload = draw_workload(100, lengths=lengths, arrivals=parse_arrivals("poisson:4"), seed=0)
    workload.num_prompt_tokens, workload.arrival_times, workload.summary()

`lengths`, `arrivals`, `bursts` and `conversations` are what can be drawn, `specs` the text they are written in; `files`
and `workload_file` read what was recorded. `draw` puts a workload together, in the `columns` of a Workload, `prompts`
fills it and `summary` describes it. `arguments` are the command line's options, and `source` what they ask for. No
engine and no clock in here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steploop.lazy import lazy_names

if TYPE_CHECKING:
    from steploop.workload.arrivals import Arrivals, Burst, Gamma, RecordedArrivals
    from steploop.workload.bursts import MarkovModulated
    from steploop.workload.columns import Segments, Workload, WorkloadRequest
    from steploop.workload.conversations import Conversations, ThinkTime
    from steploop.workload.draw import draw_workload
    from steploop.workload.files import read_arrivals, read_lengths
    from steploop.workload.lengths import Cap, Exponential, Fixed, Lengths, LogNormal, RecordedLengths, Uniform, Zipf
    from steploop.workload.prompts import PromptMaker
    from steploop.workload.ranks import Ranks
    from steploop.workload.source import WorkloadSource, workload_source
    from steploop.workload.specs import parse_arrivals, parse_lengths
    from steploop.workload.workload_file import RecordedWorkload, read_workload

# When they are used, so that `arguments` can be read without numpy.
__getattr__ = lazy_names(
    __name__,
    {
        "arrivals": ("Arrivals", "Burst", "Gamma", "RecordedArrivals"),
        "bursts": ("MarkovModulated",),
        "columns": ("Segments", "Workload", "WorkloadRequest"),
        "conversations": ("Conversations", "ThinkTime"),
        "draw": ("draw_workload",),
        "files": ("read_arrivals", "read_lengths"),
        "lengths": ("Cap", "Exponential", "Fixed", "LogNormal", "Lengths", "RecordedLengths", "Uniform", "Zipf"),
        "prompts": ("PromptMaker",),
        "ranks": ("Ranks",),
        "source": ("WorkloadSource", "workload_source"),
        "specs": ("parse_arrivals", "parse_lengths"),
        "workload_file": ("RecordedWorkload", "read_workload"),
    },
)


__all__ = [
    "Arrivals",
    "Burst",
    "Cap",
    "Conversations",
    "Exponential",
    "Fixed",
    "Gamma",
    "Lengths",
    "LogNormal",
    "MarkovModulated",
    "PromptMaker",
    "Ranks",
    "RecordedArrivals",
    "RecordedLengths",
    "RecordedWorkload",
    "Segments",
    "ThinkTime",
    "Uniform",
    "Workload",
    "WorkloadRequest",
    "WorkloadSource",
    "Zipf",
    "draw_workload",
    "parse_arrivals",
    "parse_lengths",
    "read_arrivals",
    "read_lengths",
    "read_workload",
    "workload_source",
]
