"""The served OpenAPI description, and what schemathesis makes of it: whatever is sent, the server does not fail."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/health",
    "/metrics",
    "/status",
]


@pytest.fixture(scope="module")
def schema(tiny_server: Any) -> Any:
    return schemathesis.openapi.from_url(f"{tiny_server.url}/openapi.json")


def test_every_path_is_described(schema: Any) -> None:
    assert sorted(operation.ok().path for operation in schema.get_all_operations()) == sorted(PATHS)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_request_makes_the_server_fail(schema: Any, tiny_server: Any, path: str, mode: str) -> None:
    (operation,) = (one.ok() for one in schema.get_all_operations() if one.ok().path == path)
    if mode == "NEGATIVE" and operation.method.upper() == "GET":
        pytest.skip("it takes no input")

    @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode]))
    def run(case: Any) -> None:
        response = case.call(base_url=tiny_server.url, timeout=60)
        assert response.status_code < 500, response.text
        if path.startswith("/v1/c") and response.status_code >= 400 and response.status_code != 405:
            assert response.json()["error"]["message"]

    run()
    assert tiny_server.client.get("/health").status_code == 200
