"""Requests over HTTP, to a server that does as the test says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from steploop.errors import InvalidArgumentError, LoadTestError
from steploop.loadtest.http_target import HttpTarget
from steploop.loadtest.open_loop import Limits

from .conftest import run_requests
from .fake_server import DONE, FakeServer, answer, begin_stream, text_event, usage_event


def describe(server: FakeServer, model: str | None = None) -> Any:
    async def ask() -> Any:
        target = HttpTarget(server.url)
        try:
            return await target.describe(model)
        finally:
            await target.close()

    return asyncio.run(ask())


def test_what_is_sent(server: FakeServer) -> None:
    run_requests(server, [(0.0, 3, 5)], temperature=0.5, api_key="secret")
    [body] = server.bodies
    assert body == {
        "model": "fake",
        "prompt": [1, 1, 1],
        "max_tokens": 5,
        "temperature": 0.5,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.headers[0]["Content-Type"] == "application/json"


def test_extra_body(server: FakeServer) -> None:
    run_requests(server, [(0.0, 3, 5)], extra_body={"top_p": 0.5, "temperature": 1, "ignore_eos": None})
    [body] = server.bodies
    assert (body["top_p"], body["temperature"]) == (0.5, 1)
    assert "ignore_eos" not in body
    assert "Authorization" not in server.headers[0]


def test_chat(server: FakeServer) -> None:
    result = run_requests(server, [(0.0, 3, 5)], endpoint="chat")
    assert server.bodies[0]["messages"] == [{"role": "user", "content": [1, 1, 1]}]
    assert "prompt" not in server.bodies[0]
    assert result.records[0].num_output_tokens == 5


def test_usage_and_arrivals(server: FakeServer) -> None:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(text_event(""))  # counts for nothing
        for _ in range(3):
            await asyncio.sleep(0.1)
            await response.write(text_event("ab"))
        await response.write(usage_event(7, 6, prompt_tokens_details={"cached_tokens": 4}) + DONE)
        return response

    server.script = script
    [record] = run_requests(server, [(0.0, 3, 6)]).records
    assert (record.num_prompt_tokens, record.num_output_tokens, record.num_cached_tokens) == (7, 6, 4)
    assert record.state == "completed"
    assert sum(arrival.amount for arrival in record.arrivals) == 3
    assert record.ttft is not None and record.ttft >= 0.1
    assert record.e2e is not None and record.e2e >= 0.3
    assert sum(arrival.amount for arrival in record.token_arrivals()) == 6


def test_no_usage(server: FakeServer) -> None:
    server.script = answer(usage=False, delay=0.01)
    [record] = run_requests(server, [(0.0, 3, 4)]).records
    assert (record.state, record.num_output_tokens, record.num_output_tokens_known) == ("completed", None, 4)


async def refuse(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": "too many"}, status=429)


async def break_down(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    raise RuntimeError


async def hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin_stream(request)
    await response.write(text_event("a"))
    await asyncio.sleep(30)
    return response


async def hang_up(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin_stream(request)
    await response.write(text_event("a"))
    assert request.transport is not None
    request.transport.abort()
    return response


async def hang_up_at_once(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def talk_nonsense(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(text="data: {nonsense\n\n")


async def do_not_stream(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "all of it"}]})


async def stop_short(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin_stream(request)
    await response.write(text_event("a"))
    return response


async def fail_in_the_middle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin_stream(request)
    await response.write(text_event("a") + b'data: {"error": {"message": "out of memory"}}\n\n' + DONE)
    return response


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (refuse, "http_429"),
        (break_down, "http_500"),
        (hang, "timeout"),
        (hang_up, "disconnect"),
        (hang_up_at_once, "disconnect"),
        (talk_nonsense, "malformed_stream"),
        (do_not_stream, "incomplete_stream"),
        (stop_short, "incomplete_stream"),
        (fail_in_the_middle, "error_in_stream"),
    ],
)
def test_failures_have_kinds_and_harm_no_other(server: FakeServer, script: Any, kind: str) -> None:
    async def some_fail(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (script if body["max_tokens"] == 2 else answer())(request, body)

    server.script = some_fail
    records = run_requests(server, [(0.0, 3, 1), (0.0, 3, 2), (0.05, 3, 3)], Limits(timeout=3)).records
    assert [record.state for record in records] == ["completed", "failed", "completed"]
    assert records[1].error == kind
    assert records[1].error_detail


def test_nobody_listens(server: FakeServer) -> None:
    async def run() -> None:
        target = HttpTarget("http://127.0.0.1:1/v1")
        try:
            await target.describe()
        finally:
            await target.close()

    with pytest.raises(LoadTestError, match="http://127.0.0.1:1 cannot be reached"):
        asyncio.run(run())


def test_models(server: FakeServer) -> None:
    server.models = [{"id": "a"}, {"id": "b", "meta": {"n_vocab": 77}}]
    assert (describe(server).name, describe(server).vocab_size) == ("a", None)
    assert (describe(server, "b").name, describe(server, "b").vocab_size) == ("b", 77)
    # An adapter that is not listed, perhaps.
    assert (describe(server, "c").name, describe(server, "c").vocab_size) == ("c", None)


def test_no_models(server: FakeServer) -> None:
    server.models = []
    with pytest.raises(LoadTestError, match="must list a model, or one must be named"):
        describe(server)
    assert describe(server, "c").name == "c"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "127.0.0.1:8000"}, "url must be like http://127.0.0.1:8000, got '127.0.0.1:8000'"),
        ({"url": "ftp://a"}, "url must be like"),
        ({"url": "http://"}, "url must be like"),
        ({"extra_body": {"stream": False}}, "must leave prompt, messages, stream, n alone, got stream"),
        ({"extra_body": {"n": 2}}, "got n"),
    ],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    async def make() -> None:
        HttpTarget(**{"url": "http://127.0.0.1:8000", **options})

    with pytest.raises(InvalidArgumentError, match=words):
        asyncio.run(make())


METRICS = "vllm:request_queue_time_seconds_sum {}\nvllm:request_queue_time_seconds_count {}\n"


def test_queue_time_is_that_of_the_run(server: FakeServer) -> None:
    server.metrics = METRICS.format(10.0, 100)

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        server.metrics = METRICS.format(11.5, 103)
        return await answer()(request, body)

    server.script = script
    figures = run_requests(server, [(0.0, 3, 1)] * 3).target
    assert (figures.mean_queue_time, figures.num_queue_times) == (0.5, 3)
    assert figures.queue_time_source == "vllm:request_queue_time_seconds of /metrics"


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (None, "the server has no /metrics: GET /metrics: HTTP 404"),
        ("up 1\n", "no histogram of queue times"),
        (METRICS.format(10.0, 100), "counted no request during the run"),
    ],
)
def test_no_queue_time_has_a_reason(server: FakeServer, metrics: str | None, words: str) -> None:
    server.metrics = metrics
    figures = run_requests(server, [(0.0, 3, 1)]).target
    assert figures.mean_queue_time is None
    assert words in figures.queue_time_source
