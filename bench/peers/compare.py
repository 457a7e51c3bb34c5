"""steploop beside other engines on the same requests, in turns in one run: installs them, measures, prints ratios.

python bench/peers/compare.py                                    # every default pair; an hour or more
python bench/peers/compare.py --pairs vllm,int8/openvino-int8 --workloads mixed --rounds 5
python bench/peers/compare.py --report-only                      # what the file of results holds

A pair is DTYPE/PEER, or PEER against the steploop dtype that it faces by default. Results are merged into one file by
pair and workload, so parts can be measured one by one. A peer that cannot be installed or fails is reported in table
and file, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench" / "engine"))

from catalog import PEERS, STEPLOOP  # noqa: E402
from install import CommandError, Installer  # noqa: E402
from machine import describe_machine  # noqa: E402
from measure import Options, Pair, measure  # noqa: E402
from ratios import Entry, entries_of, entry_name, failed_entry, format_report, has_failed  # noqa: E402
from script import RESULTS, add_wait_quiet, positive, say, write_json  # noqa: E402
from workload import MAX_OUTPUT, NUM_REQUESTS, TOKEN_IDS, WORKLOADS  # noqa: E402

from steploop.demo.model import find_demo_model  # noqa: E402
from steploop.weights import open_checkpoint  # noqa: E402

SLOTS = [8, 32, 64]

T = TypeVar("T")


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes JSON, returns the exit code."""
    args = _parse(argv)
    entries: dict[str, Entry] = json.loads(args.output.read_text()) if args.output.exists() else {}
    if args.report_only:
        print(format_report(entries))
        return 0
    workloads = {
        name: {"name": name, "num_requests": args.num_requests, "max_output": args.max_output}
        for name in args.workloads
    }
    settings = {"model": args.model.name, "num_threads": args.threads}  # a name, not where it lies
    common = {
        "machine": describe_machine(),
        "settings": settings | {"num_requests": args.num_requests, "max_output": args.max_output},
    }
    ready, new = _install(args, common)
    if args.install_only:
        print(format_report(new))
        return int(bool(new))
    vocab_size = min(TOKEN_IDS[1], open_checkpoint(args.model).spec.vocab_size)
    options = Options(
        model=args.model,
        workloads={name: workload | {"vocab_size": vocab_size} for name, workload in workloads.items()},
        slots=args.slots,
        all_slots=args.all_slots,
        rounds=args.rounds,
        threads=args.threads,
        wait_quiet=args.wait_quiet,
        timeout=args.timeout,
    )
    for pair, (python, model) in ready.items():
        new |= entries_of(pair, measure(pair, python, model, options), common)
        write_json(args.output, entries | new)  # kept if the next one is interrupted
    write_json(args.output, entries | new)
    print(format_report(entries | new))
    return int(any(has_failed(entry) for entry in new.values()))


def _install(
    args: argparse.Namespace, common: dict[str, Any]
) -> tuple[dict[Pair, tuple[Path, Path]], dict[str, Entry]]:
    """Python and model of the peers that could be installed; for the others, entries that say why not."""
    installer = Installer(args.folder, args.model)
    ready, failed = {}, {}
    for pair in args.pairs:
        peer = PEERS[pair.peer]
        try:
            python = installer.environment(peer.environment) / "bin" / "python"
            ready[pair] = (python, installer.model(peer.model_format))
        except CommandError as error:
            say(f"{pair}: {error}")
            for workload in args.workloads:
                entry = failed_entry(pair, workload, error.command, error.output, common)
                failed[entry_name(pair, workload)] = entry
    return ready, failed


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=_list_of(_pair), metavar="PAIR,...", help=f"peers: {', '.join(PEERS)}")
    parser.add_argument(
        "--steploop-dtypes",
        type=_list_of(_choice("dtype", STEPLOOP)),
        metavar="DTYPE,...",
        help=f"only pairs of these: {', '.join(STEPLOOP)}",
    )
    parser.add_argument(
        "--workloads",
        type=_list_of(_choice("workload", WORKLOADS)),
        default=list(WORKLOADS),
        metavar="NAME,...",
        help=f"default: {','.join(WORKLOADS)}",
    )
    parser.add_argument("--rounds", type=positive, help="runs of each; default: by peer, 5 for those to beat")
    parser.add_argument(
        "--slots",
        type=_list_of(positive),
        default=SLOTS,
        metavar="N,...",
        help="sequences at once that the peer may choose from, by one run with each; default 8,32,64",
    )
    parser.add_argument("--all-slots", action="store_true", help="measure all of them in full")
    parser.add_argument("--model", type=Path, help="GGUF file or model folder; default: the demo model")
    parser.add_argument("--threads", type=positive, help="of every engine; default: the cores there are")
    parser.add_argument("--num-requests", type=positive, default=NUM_REQUESTS, help="only the first so many")
    parser.add_argument("--max-output", type=positive, default=MAX_OUTPUT, help="cut outputs to so many tokens")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS", help="of a run or start; default 900")
    add_wait_quiet(parser)
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers", help="where peers are; default: .peers")
    parser.add_argument("--output", type=Path, default=RESULTS / "peers.json", help="merged into this file")
    parser.add_argument("--install-only", action="store_true", help="install and convert, measure nothing")
    parser.add_argument("--report-only", action="store_true", help="print what the file holds, measure nothing")
    args = parser.parse_args(argv)
    if args.num_requests > NUM_REQUESTS:
        parser.error(f"--num-requests must be at most {NUM_REQUESTS}, got {args.num_requests}")
    args.pairs = args.pairs or [Pair(peer.against, name) for name, peer in PEERS.items()]
    args.pairs = [pair for pair in args.pairs if pair.dtype in (args.steploop_dtypes or STEPLOOP)]
    if not args.pairs:
        parser.error(f"no pair is left that has steploop in {' or '.join(args.steploop_dtypes)}")
    args.model = args.model or find_demo_model()
    args.threads = args.threads or len(os.sched_getaffinity(0))
    return args


def _pair(text: str) -> Pair:
    dtype, slash, peer = text.rpartition("/")
    peer = _choice("peer", PEERS)(peer)
    return Pair(_choice("dtype", STEPLOOP)(dtype) if slash else PEERS[peer].against, peer)


def _choice(what: str, names: Collection[str]) -> Callable[[str], str]:
    def choose(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{what} must be one of {', '.join(names)}, got {text!r}")
        return text

    return choose


def _list_of(item: Callable[[str], T]) -> Callable[[str], list[T]]:
    def items(text: str) -> list[T]:
        try:
            return [item(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be whole numbers, got {text!r}") from None

    return items


if __name__ == "__main__":
    sys.exit(main())
