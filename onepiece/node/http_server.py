"""Uvicorn around an ASGI application, as a resource: bound when entered, gone when left."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import uvicorn
from starlette.types import ASGIApp

from onepiece.errors import ConfigError

BACKLOG = 1024
CONNECTIONS_MAX = 8192
HEADER_BYTES_MAX = 64 << 10
IDLE_SECONDS = 30
TICK_SECONDS = 1.0


class _Server(uvicorn.Server):
    """Uvicorn's server without its signal handlers (the node has its own), up and gone without delay."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = anyio.Event()
        self._told = anyio.Event()

    def tell_exit(self) -> None:
        """Have the server shut down."""
        self.should_exit = True
        self._told.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self.up.set()

    async def main_loop(self) -> None:
        """Tick once a second, for the date in answers, until told to exit."""
        while not await self.on_tick(0):
            with anyio.move_on_after(TICK_SECONDS):
                await self._told.wait()


@asynccontextmanager
async def serve(
    application: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    shutdown_seconds: int = 5,
    tls_certificate: str | None = None,
    tls_key: str | None = None,
) -> AsyncIterator[int]:
    """Serve an application while the block lasts.

    Leaving the block stops listening at once, tells the application (its ``stopping`` event, if it
    has one) and gives requests in progress ``shutdown_seconds`` to end, then cancels them.

    Yields the bound port.

    Args:
        application: What answers.
        host: The address to bind; an IPv6 address may stand in brackets.
        port: The port; 0 takes a free one.
        shutdown_seconds: The bound on leaving.
        tls_certificate: A PEM file; with it the server speaks TLS only.
        tls_key: The certificate's key.

    Raises:
        ConfigError: The address is in use or none of ours, or the certificate is unusable.

    Cancelled: as leaving; the bound holds.
    """
    listening = _bind(host, port)
    try:
        server = _Server(_config(application, shutdown_seconds, tls_certificate, tls_key))
        bound_port: int = listening.getsockname()[1]
        # Not in a task group: that would wrap what the caller's block raises.
        serving = asyncio.create_task(server.serve(sockets=[listening]), name="http server")
        try:
            await server.up.wait()
            yield bound_port
        finally:
            stopping = getattr(application, "stopping", None)
            if stopping is not None:
                stopping.set()
            server.tell_exit()
            # A cancelled uvicorn leaves its connections behind; told to exit it ends within its bound.
            with anyio.CancelScope(shield=True):
                await serving
    finally:
        listening.close()


def _bind(host: str, port: int) -> socket.socket:
    host = host.removeprefix("[").removesuffix("]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol left at 0, asyncio does not switch Nagle's algorithm off on what is accepted, and
    # each answer of two segments would wait 40 ms for the client's delayed acknowledgement.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(
            f"HTTP cannot listen on {host!r} port {port!r}: {error}; give another address, or port 0 for a "
            "free port",
            host=host,
            port=port,
        ) from error
    return listening


def _config(
    application: ASGIApp, shutdown_seconds: int, tls_certificate: str | None, tls_key: str | None
) -> uvicorn.Config:
    # Uvicorn speaks through the standard library's logging; its errors belong on standard error, and
    # what it says of itself and of each request nowhere.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        application,
        loop="none",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS_MAX,
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=shutdown_seconds,
        h11_max_incomplete_event_size=HEADER_BYTES_MAX,
        ssl_certfile=tls_certificate,
        ssl_keyfile=tls_key,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"the proxy's certificate {tls_certificate!r} is unusable: {error}") from error
    return config
