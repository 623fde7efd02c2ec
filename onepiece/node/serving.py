"""What a node serves over HTTP: its proxy, and its metrics where it was told to."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from onepiece.errors import ConfigError
from onepiece.node.advertising import advertised_host
from onepiece.node.http_metrics import PATH, MetricsApp
from onepiece.node.node_metrics import NodeMetrics
from onepiece.node.options import NodeOptions
from onepiece.node.parts import NodeParts
from onepiece.node.proxy import ProxyOptions, build_app
from onepiece.node.proxy_service import ProxyService
from transports import Address, ListenFailed


@asynccontextmanager
async def serve_proxy(
    options: NodeOptions, proxy: ProxyService, metrics: NodeMetrics, parts: NodeParts, own: Address
) -> AsyncIterator[str]:
    """Serve what clients ask, and metrics, while the block lasts; yields where they reach it.

    Raises ``ListenFailed`` if the address of ``--http`` cannot be listened on.
    """
    bounds = ProxyOptions(body_bytes_max=options.body_bytes_max, redirects_refused=options.redirect_refused)
    app = build_app(proxy, bounds, metrics.shown)
    metrics.of_proxy(proxy, app)
    async with _serve("--http", options.http, app, parts, own) as url:
        yield url


@asynccontextmanager
async def serve_metrics(
    options: NodeOptions, metrics: NodeMetrics, parts: NodeParts, own: Address
) -> AsyncIterator[str | None]:
    """Serve a node's metrics where it was told to, while the block lasts; yields their URL, if so.

    Raises ``ListenFailed`` if the address of ``--metrics`` cannot be listened on.
    """
    if options.metrics is None:
        yield None
        return
    async with _serve("--metrics", options.metrics, MetricsApp(metrics.shown), parts, own) as url:
        yield f"{url}{PATH}"


@asynccontextmanager
async def _serve(flag: str, place: str, app: Any, parts: NodeParts, own: Address) -> AsyncIterator[str]:
    host, _, port = place.rpartition(":")
    async with AsyncExitStack() as stack:
        try:
            bound = await stack.enter_async_context(parts.serve_http(app, host, int(port)))
        except ConfigError as error:
            if "port" not in error.fields:
                raise
            raise ListenFailed(f"{flag}: {error.message}") from error
        shown = advertised_host(host, own)
        yield f"http://[{shown}]:{bound}" if ":" in shown else f"http://{shown}:{bound}"
