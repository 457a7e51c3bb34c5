"""The options that say what a workload is drawn from, the same for every command. Imports nothing that takes time."""

from __future__ import annotations

import argparse


def add_workload_arguments(
    group: argparse._ActionsContainer,
    *,
    with_sweep: bool = True,
    num_requests: str = "100",
    arrivals: str = "burst",
) -> None:
    """Adds all that `steploop.workload.workload_source` reads; `with_sweep`: --rate-sweep, too.

    Args:
        num_requests, arrivals: What the help says of the defaults.
    """
    group.add_argument(
        "--num-requests", type=int, metavar="N", help=f"how many (default {num_requests}; with a file, all it has)"
    )
    _add_lengths(group)
    _add_arrivals(group, arrivals)
    _add_file(group)
    _add_conversations(group)
    _add_labels(group)
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


def _add_arrivals(group: argparse._ActionsContainer, default: str) -> None:
    group.add_argument(
        "--arrivals",
        metavar="SPEC",
        help="burst: all at once; poisson:RATE: RATE requests a second at random; gamma:RATE:BURSTINESS: 1 is poisson, "
        "a smaller BURSTINESS has them in clusters, a larger one evens them out; "
        "mmpp:RATE:BURST_RATE:MEAN_CALM:MEAN_BURST: poisson whose rate is now RATE, now BURST_RATE, for a random time "
        "of so many seconds on average (a rate of the sweep is the mean of both); file:PATH: a time in seconds on each "
        f"line, or in a .jsonl file objects with timestamp (default {default})",
    )


def _add_file(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--workload-file",
        metavar="FILE",
        help="replay the requests of FILE: lengths, arrivals (unless --arrivals says otherwise) and shared prefixes, "
        "as far as it has them. JSON lines, or CSV below a line of names: timestamp, prompt_tokens and output_tokens, "
        "or those of the traces of Azure (TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT, Mooncake or Qwen "
        "(timestamp, input_length, output_length, hash_ids), among others in any order. Timestamps are seconds "
        "(Mooncake's: milliseconds) or dates with times",
    )
    group.add_argument(
        "--skip-empty",
        action="store_true",
        help="leave out requests of FILE with no prompt or no output tokens, such as failed ones (else an error)",
    )
    group.add_argument("--speedup", type=float, metavar="X", help="let recorded times pass X times as fast (default 1)")


def _add_conversations(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--turns",
        metavar="SPEC",
        help="requests come in conversations of so many turns, in the forms of --prompt-lengths. A turn's prompt is "
        "all that was said before and a part of its own, which --prompt-lengths are then of; earlier answers are in it "
        "as drawn, not as the model gave them. --arrivals are those of conversations. They are drawn until they have "
        "--num-requests turns, and are whole but for the last: in the end only begun ones go on",
    )
    group.add_argument(
        "--think-time",
        metavar="SPEC",
        help="from a turn's arrival to the next one's, however long the answer takes: exponential:SECONDS (their mean) "
        "or fixed:SECONDS (default exponential:10)",
    )
    group.add_argument(
        "--max-conversation-tokens",
        type=int,
        metavar="N",
        help="a conversation ends before the turn whose prompt and output together would have more",
    )
    group.add_argument(
        "--shared-prefix",
        metavar="TOKENS[:GROUPS[:EXPONENT]]",
        help="put a system prompt of so many tokens before each prompt: one for each of GROUPS groups (default 1) that "
        "conversations, or requests, are drawn from, evenly or the k-th in proportion to 1 / k^EXPONENT",
    )


def _add_labels(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--tenants",
        metavar="N[:EXPONENT]",
        help="each conversation, or request, is one of N tenants', drawn evenly or the k-th in proportion to "
        "1 / k^EXPONENT; sent as the request's tenant",
    )
    group.add_argument(
        "--priorities",
        metavar="N[:EXPONENT]",
        help="likewise, a priority from 0 (to be served first) to N - 1",
    )
