"""What a server withstands: keys, large and broken bodies, full queues, clients that leave or do not read."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

JSON = {"Content-Type": "application/json"}
LONG = {"prompt": "hello", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def client(tiny_server: Any) -> httpx.Client:
    return tiny_server.client  # type: ignore[no-any-return]


def wait_for(holds: Callable[[], bool], *, seconds: float = 30) -> None:
    ends_at = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends_at
        time.sleep(0.02)


def now(client: httpx.Client) -> dict[str, Any]:
    return client.get("/status").json()["now"]  # type: ignore[no-any-return]


def is_idle(client: httpx.Client) -> bool:
    state = now(client)
    return state["running"] == 0 and state["waiting"] == 0 and state["kv_cache_usage"] == 0


def connect(client: httpx.Client) -> socket.socket:
    address = urlsplit(str(client.base_url))
    return socket.create_connection((address.hostname, address.port))


def send_request(connection: socket.socket, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + content)


class TestBodies:
    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"{",
            b"[1]",
            b"null",
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            b'{"prompt":"x","seed":' + b"9" * 5000 + b"}",
            b'{"prompt":"x","temperature":NaN}',
            b'{"prompt":"x","temperature":1e999}',
            b'{"prompt":"\\ud800"}',
            b'{"prompt":"x","stop":"\\ud800"}',
            b'{"prompt":"x","tenant":"\\ud800"}',
            b'{"prompt":"x","structured_outputs":{"regex":"\\ud800"}}',
            b'{"prompt":"x","\\ud800":1}',
            b'{"prompt":"x","' + b'":1,"'.join(b"%d" % i for i in range(100_000)) + b'":1}',
            b'{"prompt":"x","logit_bias":{"' + b'":"","'.join(b"%d" % i for i in range(100_000)) + b'":""}}',
            b'{"prompt":[' + b"{}," * 1_000_000 + b"{}]}",
            b'{"prompt":"x","stop_token_ids":[' + b'"",' * 1_000_000 + b'""]}',
        ],
    )
    def test_that_are_broken(self, client: httpx.Client, content: bytes) -> None:
        response = client.post("/v1/completions", content=content, headers=JSON)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]
        assert len(response.content) < 2000
        assert client.get("/health").status_code == 200  # over the same connection

    def test_that_name_another_model(self, client: httpx.Client) -> None:
        for _ in range(2):  # over the same connection
            response = client.post("/v1/completions", content=b'{"prompt":"x","model":"\\ud800"}', headers=JSON)
            assert response.status_code == 404
            assert "\\ud800" in response.json()["error"]["message"]

    def test_that_are_too_large(self, client: httpx.Client) -> None:
        content = b'{"prompt":"' + b"x" * (5 << 20) + b'"}'
        response = client.post("/v1/completions", content=content)
        assert response.status_code == 413
        assert "at most 4194304 bytes" in response.json()["error"]["message"]

        def in_chunks() -> Iterator[bytes]:  # without a length that tells
            for _ in range(80):
                yield b"x" * 65536

        assert client.post("/v1/completions", content=in_chunks()).status_code == 413

    def test_that_never_end(self, client: httpx.Client) -> None:
        connections = [connect(client) for _ in range(20)]
        for connection in connections:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert client.get("/health").status_code == 200
        for connection in connections:
            connection.close()
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


class TestClientsThatLeave:
    def test_in_the_middle_of_a_stream(self, client: httpx.Client) -> None:
        connections = [connect(client) for _ in range(200)]
        for connection in connections:
            send_request(connection, {**LONG, "stream": True})
        for connection in connections[:8]:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        for connection in connections:
            connection.close()
        wait_for(lambda: is_idle(client))

    def test_before_the_answer(self, client: httpx.Client) -> None:
        connections = [connect(client) for _ in range(20)]
        for connection in connections:
            send_request(connection, LONG)
        wait_for(lambda: now(client)["running"] > 0)
        for connection in connections:
            connection.close()
        wait_for(lambda: is_idle(client))


def test_slow_readers_get_everything(client: httpx.Client) -> None:
    """And nobody waits for them."""
    connections = [connect(client) for _ in range(4)]
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)
        send_request(connection, {**LONG, "stream": True, "logprobs": 20})
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4}).status_code == 200
    wait_for(lambda: is_idle(client))  # the engine is done with them long before they have read
    for connection in connections:
        connection.settimeout(30)
        received = b""
        while b"data: [DONE]" not in received:
            part = connection.recv(65536)
            assert part
            received += part
        connection.close()
        assert received.count(b'"finish_reason":"length"') == 1


def test_a_full_queue(tiny_llama: Path, serve: Any) -> None:
    """Each of many requests gets an answer: its tokens, or 429."""
    options = ("--num-threads", "1", "--max-num-seqs", "2", "--max-num-queued-requests", "16", "--no-prefix-caching")
    with serve(tiny_llama, *options) as server:
        statuses = asyncio.run(flood(server.url, 10_000))
        assert sum(statuses.values()) == 10_000
        assert set(statuses) == {200, 429}
        assert statuses[200] >= 18
        assert is_idle(server.client)


async def flood(url: str, count: int) -> dict[int, int]:
    import aiohttp

    statuses: dict[int, int] = {}
    body = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=400)) as session:

        async def one() -> None:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                answer = await response.json()
                if response.status == 429:
                    assert int(response.headers["Retry-After"]) >= 1
                    assert answer["error"]["code"] == "queue_full"
                else:
                    assert answer["usage"]["completion_tokens"] == 40
                statuses[response.status] = statuses.get(response.status, 0) + 1

        await asyncio.gather(*(one() for _ in range(count)))
    return statuses


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[Any]:
    """One that asks for a key."""
    from .conftest import serving

    with serving(tiny_llama, "--num-threads", "1", env={"STEPLOOP_API_KEY": "sesame"}) as server:
        yield server


class TestKeys:
    @pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/status", "/openapi.json", "/nothing"])
    def test_they_are_asked_for(self, server: Any, path: str) -> None:
        for headers in ({}, {"Authorization": "Bearer sesam"}, {"Authorization": "sesame"}, {"Authorization": "é"}):
            response = httpx.get(server.url + path, headers={k: v.encode() for k, v in headers.items()})
            assert response.status_code == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
        for scheme in ("Bearer", "bearer"):
            response = httpx.get(server.url + path, headers={"Authorization": f"{scheme} sesame"})
            assert response.status_code == (404 if path == "/nothing" else 200)

    def test_before_the_body_is_read(self, server: Any) -> None:
        assert httpx.post(f"{server.url}/v1/completions", content=b"{").status_code == 401

    def test_health_and_the_page_are_open(self, server: Any) -> None:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert "<title>steploop" in httpx.get(server.url).text
