"""A server under many streams at once, some of them broken off, some read slowly: nothing may be lost, nor leak.

python bench/soak.py                                  # 500 streams for a minute on the demo model
python bench/soak.py --model FOLDER --streams 50 --seconds 5

Each client asks again as soon as it is answered. In the end every request has been answered whole or refused with 429,
none is left in the engine, no KV block is in use, memory has not grown, and /health always took less than a second.
Prints what it saw; the exit code is 1 if any of that does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from steploop.demo.model import find_demo_model

HEALTH_LIMIT_S = 1.0
MAX_GROWTH_BYTES = 64 << 20  # of 60 seconds; an answer kept for ever by mistake takes more with so many
DRAIN_TIMEOUT_S = 60
PAGE = os.sysconf("SC_PAGE_SIZE")


class Soak:
    """The clients, and what they and a watcher see."""

    def __init__(self, url: str, pid: int, args: argparse.Namespace) -> None:
        self.url = url
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.health_s: list[float] = []
        self.memory: list[tuple[float, int]] = []
        self._pid = pid
        self._args = args
        self._ends_at = time.monotonic() + args.seconds

    async def run(self) -> dict[str, Any]:
        """Until the time is over and every client has its last answer; then the server's state."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(self.url, connector=connector, timeout=timeout) as session:
            watcher = asyncio.create_task(self._watch())
            await asyncio.gather(*(self._client(session, number) for number in range(self._args.streams)))
            state = await self._idle_state(session)
            watcher.cancel()
        return state

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        generator = random.Random(number)
        kind = ("whole", "whole", "leaves", "slow")[number % 4]
        while time.monotonic() < self._ends_at:
            try:
                self.outcomes[await self._request(session, kind, generator)] += 1
            except Exception as error:
                self.problems.append(f"{kind}: {type(error).__name__}: {error}")

    async def _request(self, session: aiohttp.ClientSession, kind: str, generator: random.Random) -> str:
        num_tokens = generator.randint(4, self._args.max_tokens)
        body = {
            "prompt": f"{generator.random()} " * generator.randint(1, 8),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with session.post("/v1/completions", json=body) as response:
            if response.status == 429:
                await asyncio.sleep(float(response.headers["Retry-After"]))
                return "refused"
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            last = b""
            async for line in response.content:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    last = line
                    if kind == "leaves" and generator.random() < 0.2:
                        return "left"
                    if kind == "slow":
                        await asyncio.sleep(0.02)
            usage = json.loads(last.removeprefix(b"data: ")).get("usage")
            if usage is None or usage["completion_tokens"] != num_tokens:
                raise RuntimeError(f"{num_tokens} tokens were asked for, and this came last: {last!r}")
            return "answered"

    async def _watch(self) -> None:
        """Over connections of its own, so that it waits for the server alone."""
        while True:
            began = time.monotonic()
            async with aiohttp.ClientSession(self.url) as session, session.get("/health") as response:
                if response.status != 200:
                    self.problems.append(f"/health: status {response.status}")
            self.health_s.append(time.monotonic() - began)
            self.memory.append((time.monotonic(), _resident_bytes(self._pid)))
            await asyncio.sleep(0.25)

    async def _idle_state(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while True:
            async with session.get("/status") as response:
                now: dict[str, Any] = (await response.json())["now"]
            if now["running"] == now["waiting"] == 0 or time.monotonic() > deadline:
                return now
            await asyncio.sleep(0.1)


def judge(soak: Soak, state: dict[str, Any]) -> list[str]:
    """What does not hold."""
    problems = list(soak.problems)
    if state["running"] or state["waiting"] or state["kv_cache_usage"]:
        problems.append(f"the engine is not empty: {state}")
    if not soak.outcomes["answered"]:
        problems.append("no request was answered")
    if max(soak.health_s, default=HEALTH_LIMIT_S + 1) > HEALTH_LIMIT_S:
        problems.append(f"/health took up to {max(soak.health_s, default=0):.2f} s")
    if (grown := growth_bytes(soak.memory)) > MAX_GROWTH_BYTES:
        problems.append(f"memory has grown by {grown / 2**20:.0f} MiB")
    return problems


def growth_bytes(memory: list[tuple[float, int]]) -> int:
    """Of the last quarter of the time over the second: at first buffers and caches fill."""
    sizes = [size for _, size in memory]
    quarter = max(1, len(sizes) // 4)
    return max(sizes[-quarter:], default=0) - max(sizes[quarter : 2 * quarter], default=0)


def main(argv: list[str] | None = None) -> int:
    """Starts a server, runs the clients, prints what they saw, returns the exit code."""
    args = _parse(argv)
    command = [sys.executable, "-m", "steploop", "serve", str(args.model or find_demo_model()), "--port", "0"]
    command += ["--max-model-len", "512"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        soak = Soak(url, process.pid, args)
        problems = judge(soak, asyncio.run(soak.run()))
    finally:
        process.terminate()
        code = process.wait()
    if code:
        problems.append(f"the server ended with {code}")
    health = sorted(soak.health_s)
    print(
        f"{args.streams} streams for {args.seconds:g} s: {dict(soak.outcomes)}; /health p50 "
        f"{health[len(health) // 2] * 1000:.0f} ms, at most {health[-1] * 1000:.0f} ms; memory "
        f"{soak.memory[-1][1] / 2**20:.0f} MiB, grown by {growth_bytes(soak.memory) / 2**20:.1f} MiB"
    )
    for problem, count in Counter(problems).most_common(20):
        print(f"PROBLEM ({count} times): {problem}")
    return int(bool(problems))


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="PATH", help="default: the demo model")
    parser.add_argument("--streams", type=int, default=500, help="clients at once; default 500")
    parser.add_argument("--seconds", type=float, default=60, help="until no client asks again; default 60")
    parser.add_argument("--max-tokens", type=int, default=64, help="of the longest answer; default 64")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
