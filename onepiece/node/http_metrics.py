"""``GET /metrics``: on a proxy beside its other paths, and where a node was told to with ``--metrics``."""

from typing import Final

from attrs import define, field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from onepiece.metrics import CONTENT_TYPE, Metrics
from onepiece.node.http_boundary import ErrorBoundary
from onepiece.node.http_options import ProxyOptions

PATH: Final = "/metrics"


def metrics_route(metrics: Metrics) -> Route:
    """The path under which a node's metrics are read."""

    async def scrape(request: Request) -> Response:
        return Response(await metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    return Route(PATH, scrape, methods=["GET"])


@define(eq=False)
class MetricsApp:
    """An ASGI application that shows a node's metrics and nothing else."""

    metrics: Metrics
    _boundary: ErrorBoundary = field(init=False)

    def __attrs_post_init__(self) -> None:
        router = Router([metrics_route(self.metrics)], redirect_slashes=False, default=_not_found)
        self._boundary = ErrorBoundary(router, ProxyOptions())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._boundary(dict(scope) | {"app": self}, receive, send)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404, f"there is no such path; metrics are at {PATH}")
