"""What one sees while the demo runs: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from steploop.demo.measure import Progress
from steploop.demo.report import TITLES
from steploop.text import printable

_REFRESHES_PER_SECOND = 8


class DemoView:
    """Shows one run at a time. Use as a context manager around the run and pass `update` to it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._num_reported = 0
        self._shown_at = 0.0
        if console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> DemoView:
        self._live_context().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._live_context().__exit__(*details)

    def update(self, progress: Progress) -> None:
        """Takes in what a step brought."""
        if self._live is None:
            self._print_finished(progress)
        elif progress.elapsed - self._shown_at >= 1 / _REFRESHES_PER_SECOND:
            self._shown_at = progress.elapsed
            self._live.update(_frame(progress, self._console.width), refresh=True)

    def _live_context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._live is None else self._live

    def _print_finished(self, progress: Progress) -> None:
        num_finished = sum(output.finished for output in progress.latest.values())
        if num_finished > self._num_reported:
            self._num_reported = num_finished
            stats = progress.stats
            self._console.print(
                f"{TITLES[progress.run.policy]}: {num_finished}/{len(progress.prompts)} done after "
                f"{progress.elapsed:.1f} s, {stats['num_running']} running, {stats['num_waiting']} waiting, "
                f"KV {_kv_percent(stats):.0f}%, {_rate(progress):.0f} tokens/s",
                highlight=False,
                soft_wrap=True,
            )


def _frame(progress: Progress, width: int) -> Panel:
    stats = progress.stats
    num_finished = sum(output.finished for output in progress.latest.values())
    line = (
        f"waiting {stats['num_waiting']:2}   running {stats['num_running']:2}   "
        f"done {num_finished:2}/{len(progress.prompts)}   KV {_kv_percent(stats):3.0f}%   "
        f"{_rate(progress):4.0f} tokens/s   {progress.elapsed:5.1f} s"
    )
    table = Table(box=None, show_header=True, expand=True, padding=(0, 1))
    table.add_column("tokens", justify="right", width=7)
    table.add_column("request", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("its last words", ratio=2, no_wrap=True)
    running = [(i, output) for i, output in sorted(progress.latest.items()) if not output.finished]
    for index, output in running[: progress.run.num_slots]:
        completion = output.outputs[0]
        tail = printable(" ".join(completion.text.split()))[-max(16, width // 2 - 12) :]
        table.add_row(
            f"{len(completion.token_ids)}/{progress.prompts[index].max_tokens}",
            Text(progress.prompts[index].text),
            Text(tail),
        )
    for _ in range(progress.run.num_slots - len(running)):
        table.add_row("", Text("(idle)" if stats["num_running"] < progress.run.num_slots else "", style="dim"), "")
    return Panel(Group(Text(line, style="bold"), table), title=TITLES[progress.run.policy], width=width)


def _kv_percent(stats: dict[str, Any]) -> float:
    return 100 * float(stats["num_used_kv_blocks"]) / float(stats["num_kv_blocks"])


def _rate(progress: Progress) -> float:
    return progress.num_tokens / max(progress.elapsed, 1e-9)
