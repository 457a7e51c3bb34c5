"""What a reader of a run's figures must know before believing them, in plain words."""

from __future__ import annotations

from typing import Any

# Shares of a latency above which the client's own slowness is part of what it reports.
_LATE = 0.1
_LAGGING = 0.5
_BUSY = 0.8
_CACHED = 0.1
_NOT_OURS = 0.02


def find_warnings(figures: dict[str, Any], share_known: float = 0.0) -> list[str]:
    """Sentences, the gravest first; none for a run without fault. `share_known`: see summarize_run."""
    return [*_about_requests(figures), *_about_client(figures), *_about_server(figures, share_known)]


def _about_requests(figures: dict[str, Any]) -> list[str]:
    requests, lengths = figures["requests"], figures["lengths"]
    warnings = []
    if figures["incomplete"]:
        warnings.append(
            f"the run was interrupted: {requests['unfinished']} requests were in flight, {requests['not_sent']} not "
            "yet sent; what is reported is of those that had ended, the quick ones among the late"
        )
    if requests["failed"]:
        warnings.append(
            f"{requests['failed']} of {requests['asked']} requests failed; latencies are of the "
            f"{requests['completed']} completed ones"
        )
    if lengths["num_truncated"]:
        warnings.append(
            f"{lengths['num_truncated']} answers have fewer tokens than asked: they ended early, and look faster for it"
        )
    if lengths["num_longer"]:
        warnings.append(f"{lengths['num_longer']} answers have more tokens than asked")
    if lengths["num_without_usage"]:
        warnings.append(
            f"{lengths['num_without_usage']} answers came without usage: their tokens are counted as chunks with text, "
            "whose tokens may be more"
        )
    num_textless = figures["latencies"]["ttft"]["num_missing"] - requests["asked"] + requests["completed"]
    if num_textless:
        warnings.append(
            f"{num_textless} completed answers had no text, so that no time to first token is known of them"
        )
    return warnings


def _about_client(figures: dict[str, Any]) -> list[str]:
    client, latencies = figures["client"], figures["latencies"]
    warnings = []
    ttft, late = latencies["ttft"]["p50"], client["lateness"]["p99"]
    if ttft is not None and late is not None and late > _LATE * ttft:
        warnings.append(
            f"requests were sent up to {_ms(late)} late (p99), beside a time to first token of {_ms(ttft)} (p50): this "
            "client could not keep up, and its lateness is part of the latencies"
        )
    gap, lag = latencies["chunk_gap"]["p50"], client["loop_lag"]["p99"]
    if gap is not None and lag is not None and lag > _LAGGING * gap:
        warnings.append(
            f"the client's event loop lagged by {_ms(lag)} (p99), beside {_ms(gap)} between chunks (p50): inter-token "
            "latencies are partly its own"
        )
    if client["cpu_share"] > _BUSY:
        warnings.append(
            f"the client took {client['cpu_share']:.0%} of a core: it may be the bottleneck, not what it tests"
        )
    return warnings


def _about_server(figures: dict[str, Any], share_known: float) -> list[str]:
    warnings = []
    share_cached = figures["prefix_cache"]["share_of_prompt_tokens"] or 0.0
    if share_cached > share_known + _CACHED:
        own = f" where the workload itself repeats {share_known:.0%}," if share_known else ""
        warnings.append(
            f"{share_cached:.0%} of the prompts' tokens were in the prefix cache,{own} as after an earlier run with "
            "the same --seed: choose another to measure without"
        )
    num_served, num_sent = figures["queue_time"]["count"], figures["requests"]["asked"]
    if num_served > num_sent * (1 + _NOT_OURS):
        warnings.append(f"the server counted {num_served} requests during the run: it served others, too")
    if figures["steps"] is not None and figures["steps"]["num_lost"]:
        warnings.append(f"{figures['steps']['num_lost']} of the engine's steps are missing in the record of steps")
    return warnings


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
