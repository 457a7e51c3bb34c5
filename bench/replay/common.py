"""What the replays share: published beside simulated figures, what other factors make of them, files and tables."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import steploop
from steploop.loadtest.plot import save_figure
from steploop.simulation import Deployment, Efficiencies

RESULTS = Path(__file__).parents[1] / "results"

_SHARES = (
    "weight_bandwidth_efficiency",
    "compute_efficiency",
    "kv_bandwidth_efficiency",
    "attention_compute_efficiency",
)
_STEP_US = (100.0, 2000.0)
_SCALES = (0.8, 1.2)


@dataclass(frozen=True)
class Comparison:
    """A published figure and ours. `low` and `high`: over all factors of `factor_changes`; None: not looked at."""

    what: str
    published: float
    simulated: float | None
    low: float | None = None
    high: float | None = None
    unit: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For a file, with how far they are apart."""
        apart = None if self.simulated is None else self.simulated / self.published
        return {**dataclasses.asdict(self), "simulated_over_published": apart}


def factor_changes(*, quick: bool) -> list[dict[str, float]]:
    """One factor at a time: each efficiency a fifth lower and higher, a step's own time a fifth and four times as long.
    `quick`: the first two of them."""
    default = Efficiencies()
    changes = [{name: getattr(default, name) * scale} for name in _SHARES for scale in _SCALES]
    changes += [{"step_us": step_us} for step_us in _STEP_US]
    return changes[:2] if quick else changes


def with_factors(deployment: Deployment, changes: dict[str, float]) -> Deployment:
    """The same deployment, of a device with other efficiencies."""
    device = deployment.device
    device = dataclasses.replace(device, efficiencies=device.efficiencies.replace(changes))
    return dataclasses.replace(deployment, device=device)


def compare(
    deployment: Deployment,
    figures: Callable[[Deployment], dict[str, float]],
    published: Iterable[tuple[str, str | None, float, str]],
    changes: Iterable[dict[str, float]],
) -> tuple[list[Comparison], list[dict[str, Any]]]:
    """Figures with the default factors beside the published ones, and all of them with each change of factors.

    Args:
        figures: Named, of a deployment.
        published: What it is, the name of the figure that it is compared with (None: nothing is), the value, its unit.
        changes: Factors and their values, a run for each.
    """
    default = figures(deployment)
    runs = [{"changes": change, "figures": figures(with_factors(deployment, change))} for change in changes]
    comparisons = []
    for what, name, value, unit in published:
        if name is None:
            comparisons.append(Comparison(what, value, None, unit=unit))
            continue
        values = [default[name], *(run["figures"][name] for run in runs)]
        comparisons.append(Comparison(what, value, default[name], min(values), max(values), unit))
    return comparisons, runs


def parse(description: str | None, name: str, argv: list[str] | None) -> argparse.Namespace:
    """The options of every replay: `quick`, `seed` and `output`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests and other factors, for tests")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn; default 0")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / f"replay_{name}.json", help="JSON; the SVG goes beside it"
    )
    return parser.parse_args(argv)


def finish(args: argparse.Namespace, result: dict[str, Any], figure: Any) -> int:
    """Writes JSON and SVG, prints the table, returns the exit code."""
    deployment: Deployment = result.pop("deployment")
    comparisons: list[Comparison] = result.pop("comparisons")
    result = {
        "versions": {"steploop": steploop.__version__},
        "seed": args.seed,
        "deployment": deployment.describe(),
        "device": deployment.device.as_dict(),
        **result,
        "comparisons": [comparison.as_dict() for comparison in comparisons],
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(_rounded(result), indent=1) + "\n")
    save_figure(figure, args.output.with_suffix(".svg"), result["title"])
    print("\n".join(table(json.loads(args.output.read_text()))))
    return 0


def table(result: dict[str, Any]) -> list[str]:
    """Lines of Markdown, from what `finish` has written."""
    lines = [f"| {result['title']} | published | simulated | simulated / published | other factors |"]
    lines.append("|---|---|---|---|---|")
    for row in result["comparisons"]:
        cells = [row["what"], _show(row["published"], row["unit"])]
        if row["simulated"] is None:
            cells += ["not simulated", "", ""]
        else:
            cells += [_show(row["simulated"], row["unit"]), f"{row['simulated_over_published']:.2f}"]
            cells.append(f"{_number(row['low'])} to {_number(row['high'])}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def say(text: str) -> None:
    """Tells how it is going; results alone go to stdout."""
    print(text, file=sys.stderr, flush=True)


def _show(value: float, unit: str) -> str:
    return f"{_number(value)}{'' if unit in ('', 'x') else ' '}{unit}"


def _number(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def _rounded(value: Any) -> Any:
    """Six digits are enough, and the same with any library of mathematics."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    return value
