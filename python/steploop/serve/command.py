"""The command `steploop serve`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import os
import socket
import sys
from pathlib import Path
from types import FrameType

from steploop.async_engine import AsyncLLMEngine
from steploop.checks import as_finite, check_trace_path, checked_int
from steploop.engine_arguments import engine_config
from steploop.errors import InvalidArgumentError

try:
    import uvicorn

    from steploop.openai.model import ServedModel
    from steploop.serve.app import make_app
    from steploop.serve.guard import Guard
    from steploop.serve.metrics import ServerMetrics
    from steploop.serve.service import Service
except ImportError as error:
    raise InvalidArgumentError(f"serve needs further packages ({error}): pip install 'steploop[serve]'") from None

_SLOW_CLIENTS_S = 5  # for those who still read when the engine is done
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def run_serve(arguments: argparse.Namespace) -> None:
    """Serves until SIGTERM or Ctrl-C, then lets what is in flight end.

    Raises:
        SteploopError: anything the user can mend.
    """
    _check(arguments)
    api_key = arguments.api_key if arguments.api_key is not None else os.environ.get("STEPLOOP_API_KEY")
    if api_key is not None and not api_key.strip():
        raise InvalidArgumentError("the API key must not be empty")
    config = dataclasses.replace(
        engine_config(arguments),
        max_num_queued_requests=arguments.max_num_queued_requests or None,
        max_num_queued_tokens=arguments.max_num_queued_tokens,
    )
    listener = _listen(arguments.host, arguments.port)  # before the model is loaded, which takes longer
    name = arguments.served_model_name or Path(str(config.model)).name.removesuffix(".gguf")
    metrics = ServerMetrics(name)
    engine = AsyncLLMEngine(config, trace=arguments.trace, on_step=metrics.on_step)
    try:
        metrics.watch(engine.engine)
        app = make_app(Service(engine, ServedModel(engine.engine, name, arguments.max_choices)), metrics)
        server = _Server(
            uvicorn.Config(
                Guard(app, api_key=api_key, max_body_bytes=arguments.max_body_bytes),
                log_level="info" if arguments.access_log else "warning",
                access_log=arguments.access_log,
                timeout_graceful_shutdown=math.ceil(arguments.drain_timeout) + _SLOW_CLIENTS_S,
                server_header=False,
                ws="none",
            ),
            engine,
            name,
            arguments.drain_timeout,
        )
        if arguments.host not in _LOCAL_HOSTS and api_key is None:
            print(
                f"steploop: warning: whoever reaches {arguments.host} may use it: there is no API key", file=sys.stderr
            )
        server.run([listener])
    finally:
        engine.close()


class _Server(uvicorn.Server):
    """Says where it listens, and ends with status 0 when it is told to."""

    def __init__(self, config: uvicorn.Config, engine: AsyncLLMEngine, name: str, drain_timeout: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._name = name
        self._drain_timeout = drain_timeout

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        print(f"steploop: serving {self._name} at http://{address}:{port}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # What takes longer is aborted, so that its client gets a whole answer with what there is.
        drain = asyncio.create_task(self._engine.drain(self._drain_timeout))
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not the base's, which raises the signal again once all is done. A second one does not wait any more.
        self.force_exit = self.should_exit
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgumentError(f"cannot listen on {host}:{port}: {reason}") from None


def _check(arguments: argparse.Namespace) -> None:
    checked_int("--port", arguments.port, low=0, high=65535)
    checked_int("--max-body-bytes", arguments.max_body_bytes, low=1, high=1 << 40)
    checked_int("--max-num-queued-requests", arguments.max_num_queued_requests, low=0)
    checked_int("--max-choices", arguments.max_choices, low=1)
    timeout = as_finite(arguments.drain_timeout)
    if timeout is None or timeout < 0:
        raise InvalidArgumentError(f"--drain-timeout must be seconds >= 0, got {arguments.drain_timeout}")
    if arguments.trace is not None:
        check_trace_path(arguments.trace)
