"""The options that say what a workload is drawn from, the same for every command. Imports nothing that takes time."""

from __future__ import annotations

import argparse


def add_workload_arguments(group: argparse._ActionsContainer, *, with_sweep: bool = True) -> None:
    """Adds all that `steploop.workload.workload_source` reads; `with_sweep`: --rate-sweep, too."""
    group.add_argument(
        "--num-requests", type=int, metavar="N", help="how many (default 100; with a file, as many as it has)"
    )
    _add_lengths(group)
    _add_arrivals(group)
    if with_sweep:
        group.add_argument(
            "--rate-sweep",
            metavar="RATES",
            help="one run after another with these rates, such as 1,2,4,8, instead of that in --arrivals (which may be "
            "left out, for poisson); each with other prompts of the same lengths. Recorded times pass faster or slower",
        )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn (default 0)")


def _add_lengths(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--prompt-lengths",
        metavar="SPEC",
        help="tokens of prompts: fixed:N, uniform:LOW:HIGH, exponential:MEAN, lognormal:MEDIAN:SIGMA or "
        "zipf:EXPONENT:MAX. exponential and lognormal may end in :CAP:redraw or :CAP:clip, by what becomes of longer "
        "ones; zipf is from 1 to MAX, length k in proportion to 1 / k^EXPONENT (default uniform:32:256)",
    )
    group.add_argument(
        "--output-lengths",
        metavar="SPEC",
        help="tokens of outputs, in the same forms (default exponential:64:256:clip)",
    )
    group.add_argument(
        "--lengths-file",
        metavar="FILE",
        help="take both from FILE, in its order: lines PROMPT,OUTPUT, or in a .jsonl file objects with prompt_tokens "
        "and output_tokens",
    )


def _add_arrivals(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--arrivals",
        metavar="SPEC",
        help="burst: all at once; poisson:RATE: RATE requests a second at random; gamma:RATE:BURSTINESS: 1 is poisson, "
        "a smaller BURSTINESS has them in clusters, a larger one evens them out; "
        "mmpp:RATE:BURST_RATE:MEAN_CALM:MEAN_BURST: poisson whose rate is now RATE, now BURST_RATE, for a random time "
        "of so many seconds on average (a rate of the sweep is the mean of both); file:PATH: a time in seconds on each "
        "line, or in a .jsonl file objects with timestamp (default burst)",
    )
