"""The HTTP application: its routes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

import steploop
from steploop.errors import InvalidRequestError
from steploop.openai.chat import render_messages
from steploop.openai.errors import ApiError, as_api_error
from steploop.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from steploop.serve.chat import create_chat_completion
from steploop.serve.completions import create_completion
from steploop.serve.errors import add_error_handlers, error_response
from steploop.serve.history import History
from steploop.serve.metrics import CONTENT_TYPE, ServerMetrics
from steploop.serve.service import Service

_HISTORY_INTERVAL_S = 5  # the engine remembers a thousand iterations
_FIELDS = {kind: frozenset(kind.model_fields) for kind in (CompletionRequest, ChatCompletionRequest)}


def make_app(service: Service, metrics: ServerMetrics) -> FastAPI:
    """The application of one model."""
    history = History(service.model.engine)
    app = FastAPI(
        title="steploop",
        version=steploop.__version__,
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
        lifespan=_lifespan(history),
        responses={code: {"description": "The request is not valid."} for code in (400, 401, 404, 413)},
    )
    add_error_handlers(app)
    _add_generation(app, service)
    _add_text(app, service)
    _add_state(app, service, metrics, history)
    return app


def _lifespan(history: History):  # type: ignore[no-untyped-def]
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async def update() -> None:
            while True:
                await asyncio.sleep(_HISTORY_INTERVAL_S)
                history.update()

        task = asyncio.create_task(update())
        try:
            yield
        finally:
            task.cancel()

    return lifespan


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", summary="Completes prompts", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _answer(create_completion, service, body, request)

    @app.post("/v1/chat/completions", summary="Answers a conversation", response_model=None)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        return await _answer(create_chat_completion, service, body, request)


async def _answer(create: Any, service: Service, body: GenerationRequest, request: Request) -> Response:
    try:
        response: Response = await create(service, body, request)
        return response
    except Exception as error:
        return error_response(as_api_error(error, _FIELDS[type(body)]))  # type: ignore[index]


def _add_text(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", summary="Token ids of a text or a conversation")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        service.model.check_name(body.model)
        return await asyncio.to_thread(_tokenize, service, body)

    @app.post("/detokenize", summary="The text of token ids")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        service.model.check_name(body.model)
        vocab_size = service.model.engine.vocab_size
        for token in body.tokens:
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(f"tokens must be in 0..{vocab_size - 1}, got {token}")
        return {"prompt": await asyncio.to_thread(service.model.tokenizer.decode, body.tokens)}


def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages")
    tokenizer = service.model.tokenizer
    if body.messages is not None:
        rendered = render_messages(
            service.model, body.messages, tools=body.tools, add_generation_prompt=body.add_generation_prompt
        )
        tokens = rendered["prompt_token_ids"]
    else:
        assert body.prompt is not None
        tokens = tokenizer.encode(body.prompt) if body.add_special_tokens else tokenizer.encode_rendered(body.prompt)
    answer = {"count": len(tokens), "max_model_len": service.model.engine.max_model_len, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.decode([token]) for token in tokens]
    return answer


def _add_state(app: FastAPI, service: Service, metrics: ServerMetrics, history: History) -> None:
    page = files("steploop.serve").joinpath("status.html").read_text(encoding="utf-8")

    @app.get("/v1/models", summary="The model that is served")
    async def models() -> dict[str, Any]:
        model = {
            "id": service.model.name,
            "object": "model",
            "created": 0,
            "owned_by": "steploop",
            "max_model_len": service.model.engine.max_model_len,
            "vocab_size": service.model.engine.vocab_size,
        }
        return {"object": "list", "data": [model]}

    @app.get("/health", summary="200 while requests are served", response_model=None)
    async def health() -> Response:
        if not service.engine.is_running:
            return error_response(ApiError(503, "the engine has ended", code="engine_dead"))
        return Response()

    @app.get("/metrics", summary="Metrics for Prometheus", response_model=None)
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/status", summary="What the status page shows", response_model=None)
    async def status() -> Response:
        stats = service.model.engine.stats()
        now = {
            "running": stats["num_running"],
            "scheduled": stats["last_step"]["num_sequences"] if stats["num_running"] else 0,
            "waiting": stats["num_waiting"],
            "preempted": stats["num_preempted"],
            "finished": stats["num_finished"],
            "kv_cache_usage": stats["num_used_kv_blocks"] / stats["num_kv_blocks"],
            "prefix_cache_hit_rate": stats["num_prefix_hit_tokens"] / max(1, stats["num_prefix_queried_tokens"]),
            "num_preemptions": stats["num_preemptions"],
            "max_num_seqs": service.model.engine.config.max_num_seqs,
        }
        return JSONResponse(
            {"model": service.model.name, "version": steploop.__version__, "now": now, "history": history.as_dict()}
        )

    @app.get("/", include_in_schema=False)
    async def status_page() -> HTMLResponse:
        return HTMLResponse(page)
