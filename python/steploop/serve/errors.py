"""Answers that are errors, whatever raised them."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from steploop.errors import SteploopError
from steploop.openai.errors import ApiError, as_api_error, invalid_body

RETRY_AFTER_S = 1


def error_response(error: ApiError) -> JSONResponse:
    """As an answer."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.body, error.status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Makes every answer of `app` that is an error one of this form."""

    async def on_invalid_body(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(_describe_invalid(error))

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return error_response(ApiError(error.status_code, str(error.detail)))

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return error_response(as_api_error(error))

    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_error)
    for kind in (ApiError, SteploopError, Exception):
        app.add_exception_handler(kind, on_error)


def _describe_invalid(error: RequestValidationError) -> ApiError:
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, f"the body must be JSON: {errors[0].get('ctx', {}).get('error', '')}", code="invalid_json")
    return invalid_body([{**one, "loc": one["loc"][1:]} for one in errors])  # all begin with "body"
