"""The workload options of all commands: what they come to, what they refuse, and a million requests."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from steploop.errors import InvalidArgumentError
from steploop.workload import Conversations, Fixed, Gamma, Ranks, ThinkTime, Uniform, WorkloadSource, workload_source
from steploop.workload.arguments import add_workload_arguments

TRACE = "timestamp,prompt_tokens,output_tokens\n10,30,4\n12,50,0\n14,70,8\n20,90,9\n"


def source(*arguments: str, with_sweep: bool = True) -> WorkloadSource:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_workload_arguments(parser.add_argument_group("workload"), with_sweep=with_sweep)
    return workload_source(parser.parse_args(list(arguments)))


def test_defaults() -> None:
    made = source()
    assert (made.num_requests, made.seed, made.rates) == (100, 0, (None,))
    assert made.lengths[0] == Uniform(32, 256)
    assert made.specs["output_lengths"] == "exponential:64:256:clip"
    assert len(made.draw()) == 100
    assert source(with_sweep=False).draw() == made.draw()
    assert made.draw(7, seed=3) == source("--num-requests", "7", "--seed", "3").draw()


def test_rates() -> None:
    made = source("--rate-sweep", "2,0.5")
    assert (made.rates, made.arrivals) == ((2.0, 0.5), Gamma(1))
    fast, slow = (made.draw(rate=rate) for rate in made.rates)
    assert slow.arrival_times == pytest.approx(4 * fast.arrival_times)
    assert slow.num_prompt_tokens.tolist() == fast.num_prompt_tokens.tolist()
    bursts = source("--arrivals", "mmpp:1:10:0.4:0.1", "--num-requests", "50000").draw(rate=7.0)
    assert bursts.summary()["arrivals"]["rate"] == pytest.approx(7, rel=0.05)
    assert bursts.summary()["arrivals"]["burst_share"] == pytest.approx(50 / 70, abs=0.03)


def test_conversations() -> None:
    made = source(
        "--turns=uniform:1:4", "--think-time=fixed:2", "--shared-prefix=100:3:1", "--max-conversation-tokens=4000"
    )
    assert made.conversations == Conversations(
        turns=Uniform(1, 4),
        think_time=ThinkTime(2.0, "fixed"),
        num_system_tokens=100,
        groups=Ranks(3, 1.0),
        max_tokens=4000,
    )
    prefix = source("--shared-prefix", "100", "--prompt-lengths", "fixed:7")
    assert prefix.conversations == Conversations(turns=Fixed(1), num_system_tokens=100)
    assert set(prefix.draw().num_prompt_tokens.tolist()) == {107}
    assert prefix.draw().summary()["known_prompt_tokens"]["share"] == pytest.approx(99 * 100 / (100 * 107))


def test_lengths_of_a_file_may_be_turns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("10,1\n20,2\n30,3\n")
    made = source("--lengths-file", str(path), "--turns", "fixed:9", "--think-time", "fixed:1")
    assert made.draw().num_prompt_tokens.tolist() == [10, 10 + 1 + 20, 10 + 1 + 20 + 2 + 30]
    assert made.draw().arrival_times.tolist() == [0, 1, 2]


def test_workload_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    arguments = ("--workload-file", str(path), "--skip-empty", "--tenants", "2")
    made = source(*arguments)
    workload = made.draw()
    assert workload.arrival_times.tolist() == [0, 4, 10]
    assert workload.num_output_tokens.tolist() == [4, 8, 9]
    assert workload.summary()["num_skipped"] == 1
    assert len(made.draw(2)) == 2
    assert source(*arguments, "--speedup", "4").draw().arrival_times.tolist() == [0, 1, 2.5]
    assert source(*arguments, "--rate-sweep", "2").draw(rate=2.0).arrival_times == pytest.approx([0, 0.4, 1])
    assert source(*arguments, "--arrivals", "burst").draw().arrival_times.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload-file", "/no/such.csv"], "/no/such.csv cannot be read"),
        (["--workload-file", "TRACE"], "TRACE:3: prompt_tokens and output_tokens must be >= 1, got 50 and 0"),
        (
            ["--workload-file", "TRACE", "--skip-empty", "--num-requests", "4"],
            "has lengths for 3 requests, not for the 4",
        ),
        (
            ["--workload-file", "TRACE", "--skip-empty", "--turns", "fixed:2"],
            "--turns cannot be given with --workload-file",
        ),
        (["--workload-file", "TRACE", "--skip-empty", "--shared-prefix", "2"], "--shared-prefix cannot be given with"),
        (
            ["--workload-file", "TRACE", "--skip-empty", "--prompt-lengths", "fixed:2"],
            "--prompt-lengths cannot be given",
        ),
        (["--skip-empty"], "--skip-empty is for a --workload-file"),
        (["--speedup", "2"], "--speedup is for recorded times, got arrivals of burst"),
        (
            ["--workload-file", "TRACE", "--skip-empty", "--speedup", "0"],
            "the speedup of recorded arrivals must be a finite",
        ),
        (["--workload-file", "TRACE", "--skip-empty", "--speedup", "nan"], "must be a finite number > 0, got nan"),
        (["--think-time", "fixed:2"], "--think-time is for conversations: give --turns"),
        (["--max-conversation-tokens", "9"], "--max-conversation-tokens is for conversations: give --turns"),
        (["--turns", "fixed:0"], "the length of fixed must be >= 1, got 0"),
        (["--turns", "fxed:2"], "did you mean fixed:N?"),
        (
            ["--turns", "fixed:2", "--think-time", "uniform:2"],
            "the think time must be one of exponential:SECONDS, fixed:",
        ),
        (["--turns", "fixed:2", "--max-conversation-tokens", "9"], "must have at most 9 tokens"),
        (["--shared-prefix", "-5"], "the tokens of a shared prefix must be >= 1, got -5"),
        (["--tenants", "0"], "tenants must be >= 1, got 0"),
        (["--priorities", "2:x"], "the exponent of priorities must be a number, got 'x'"),
        (["--rate-sweep", "1,,2"], "--rate-sweep must be numbers with commas between them"),
        (["--rate-sweep", "nan"], "the rate of arrivals must be a finite number > 0, got nan"),
    ],
)
def test_refused(arguments: list[str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "TRACE"
    path.write_text(TRACE)
    with pytest.raises(InvalidArgumentError) as caught:
        source(*(str(path) if argument == "TRACE" else argument for argument in arguments)).draw()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_recorded_cannot_be_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("10,1\n")
    with pytest.raises(InvalidArgumentError, match="is for lengths that are drawn, not for a --lengths-file"):
        source("--lengths-file", str(path), "--turns", "fixed:2", "--max-conversation-tokens", "50")


def test_times_of_one_moment_have_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("timestamp,prompt_tokens,output_tokens\n1,2,3\n1,2,3\n")
    with pytest.raises(InvalidArgumentError, match="needs arrivals that have a rate, got those of .*a.csv"):
        source("--workload-file", str(path), "--rate-sweep", "1")


def test_the_options_take_no_time_to_import() -> None:
    code = "import sys, steploop.workload.arguments; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prompt-lengths=lognormal:200:0.8:8000:redraw", "--output-lengths=zipf:1.1:4096", "--arrivals=poisson:100"],
        [
            "--turns=exponential:5",
            "--think-time=exponential:30",
            "--shared-prefix=500:20:1",
            "--max-conversation-tokens=8192",
            "--arrivals=mmpp:10:200:20:3",
            "--tenants=50:1",
            "--priorities=3",
        ],
    ],
)
def test_a_million_requests(arguments: list[str]) -> None:
    """In seconds of the processor; a loop over them would take tens."""
    made = source(*arguments)
    start = time.process_time()
    workload = made.draw(1_000_000)
    summary: dict[str, Any] = workload.summary()
    assert time.process_time() - start < 8
    assert summary["prompt_tokens"]["count"] == 1_000_000
