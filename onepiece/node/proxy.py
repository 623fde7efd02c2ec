"""The proxy's HTTP side: what each path does with the node's ``Frontend``.

::

    POST   /v1/requests                  submit                 202, the status
    GET    /v1/requests                  list, newest first     ?limit= ?state=
    GET    /v1/requests/{uid}            status
    DELETE /v1/requests/{uid}            cancel; idempotent
    GET    /v1/requests/{uid}/events     server-sent events     Last-Event-ID, ?cancel_on_disconnect=1
    GET    /v1/requests/{uid}/result     the result             Range, Accept, ?keep=1
    DELETE /v1/requests/{uid}/result     purge the result; idempotent
    GET    /v1/workflows                 what can be submitted
    GET    /v1/nodes                     the members of the set
    GET    /v1/nodes/{node}              one of them, and what it waits for if it drains
    GET    /v1/placement                 what is wanted and runs, the moves and why
    GET    /v1/admission                 what is let in and refused, and why
    POST   /v1/nodes/{node}/drain        let a node take no new work; idempotent
    POST   /v1/nodes/{node}/resume       let it take work again; idempotent
    GET    /healthz, /readyz             alive; able to serve
    GET    /metrics                      the node in numbers, for Prometheus

It holds no state of requests: all of that is the node's. ``docs/reference/http.md`` is the reference.
"""

from collections.abc import Mapping
from typing import Any, Final

import anyio
from attrs import define, evolve, field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from onepiece.client.api import describe_workflow, status_to_plain, to_plain
from onepiece.errors import InvalidInput, NotReady, OnePieceError, UnknownRequest
from onepiece.ids import is_uid
from onepiece.log import get_logger
from onepiece.metrics import Metrics
from onepiece.node.descriptors import why_none_are_left
from onepiece.node.frontend import Frontend, ResultStream
from onepiece.node.http_bodies import SubmissionReader
from onepiece.node.http_boundary import ErrorBoundary
from onepiece.node.http_events import EventStream, parse_last_event_id, peeked
from onepiece.node.http_metrics import metrics_route
from onepiece.node.http_options import BodyBudget, ProxyOptions
from onepiece.node.http_results import ResultResponse, convert, is_converted, parse_range
from onepiece.node.http_server import serve
from onepiece.node.request_counts import RefusalCounts
from onepiece.requests import RequestState

__all__ = ["ProxyApp", "ProxyOptions", "build_app", "serve"]

LIST_MAX: Final = 1000
LIST_DEFAULT: Final = 100

_log = get_logger(part="proxy")


def build_app(
    frontend: Frontend, options: ProxyOptions | None = None, metrics: Metrics | None = None
) -> "ProxyApp":
    """The ASGI application of a proxy.

    Args:
        frontend: The node.
        options: Bounds.
        metrics: What the node shows of itself; None: nothing.
    """
    return ProxyApp(frontend, options or ProxyOptions(), metrics)


@define(eq=False)
class ProxyApp:
    """An ASGI application; ``stopping`` is set by its server to let streams of events end."""

    frontend: Frontend
    options: ProxyOptions
    metrics: Metrics | None = None
    stopping: anyio.Event = field(factory=anyio.Event)
    refusals: RefusalCounts = field(factory=RefusalCounts)
    budget: BodyBudget = field(init=False)
    boundary: ErrorBoundary = field(init=False)
    _submissions: SubmissionReader = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.budget = BodyBudget(self.options.bodies_bytes_max)
        self._submissions = SubmissionReader(self.frontend, self.options, self.budget)
        routes = [
            Route("/v1/requests", self.submit, methods=["POST"]),
            Route("/v1/requests", self.list_requests, methods=["GET"]),
            Route("/v1/requests/{uid}", self.status, methods=["GET"]),
            Route("/v1/requests/{uid}", self.cancel, methods=["DELETE"]),
            Route("/v1/requests/{uid}/events", _Endpoint(self.events), methods=["GET"]),
            Route("/v1/requests/{uid}/result", _Endpoint(self.result), methods=["GET"]),
            Route("/v1/requests/{uid}/result", self.purge, methods=["DELETE"]),
            Route("/v1/workflows", self.workflows, methods=["GET"]),
            Route("/v1/nodes", self.nodes, methods=["GET"]),
            Route("/v1/placement", self.placement, methods=["GET"]),
            Route("/v1/admission", self.admission, methods=["GET"]),
            Route("/v1/nodes/{node}", self.node, methods=["GET"]),
            Route("/v1/nodes/{node}/drain", self.drain, methods=["POST"]),
            Route("/v1/nodes/{node}/resume", self.resume, methods=["POST"]),
            Route("/healthz", self.health, methods=["GET"]),
            Route("/readyz", self.readiness, methods=["GET"]),
        ]
        if self.metrics is not None:
            routes.append(metrics_route(self.metrics))
        router = Router(routes, redirect_slashes=False, default=_not_found)
        self.boundary = ErrorBoundary(router, self.options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        # The router raises its refusals, rather than answer them in plain text, within an "app".
        await self.boundary(dict(scope) | {"app": self}, receive, send)

    async def submit(self, request: Request) -> Response:
        """Accept a request."""
        try:
            submission = await self._submissions.read(request)
            status = await self.frontend.submit(
                submission.workflow,
                submission.inputs,
                timeout_seconds=submission.timeout_seconds,
                key=submission.key,
                terms=submission.terms,
                place=submission.place,
            )
        except OnePieceError as error:
            self.refusals.note(error, self.frontend.workflows())
            raise
        return JSONResponse(status_to_plain(status), 202, {"Location": f"/v1/requests/{status.uid}"})

    async def list_requests(self, request: Request) -> Response:
        """The latest requests."""
        query = _query(request, "limit", "state")
        limit, state = query.get("limit", str(LIST_DEFAULT)), query.get("state")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= LIST_MAX):
            raise InvalidInput(f"limit is {limit[:40]!r}: give a number from 1 to {LIST_MAX}", field="limit")
        states = [each.value for each in RequestState]
        if state is not None and state not in states:
            raise InvalidInput(f"state is {state[:40]!r}: give one of {', '.join(states)}", field="state")
        found = self.frontend.requests(limit=int(limit), state=state)
        return JSONResponse({"requests": [status_to_plain(status) for status in found]})

    async def status(self, request: Request) -> Response:
        """A request's record."""
        return JSONResponse(status_to_plain(await self.frontend.status(_uid(request))))

    async def cancel(self, request: Request) -> Response:
        """Cancel a request, or learn how it ended."""
        return JSONResponse(status_to_plain(await self.frontend.cancel(_uid(request))))

    async def events(self, request: Request, receive: Receive, send: Send) -> None:
        """A request's events as they come."""
        uid = _uid(request)
        query = _query(request, "cancel_on_disconnect")
        after = parse_last_event_id(request.headers.get("last-event-id"))
        status = await self.frontend.status(uid)  # an unknown UID is told before the stream begins
        events = self.frontend.events(uid, after)
        if status.state.is_final and after >= 0:
            rest = await peeked(events)
            if rest is None:  # by the specification of server-sent events: come again no more
                await Response(status_code=204)(request.scope, receive, send)
                return
            events = rest
        stream = EventStream(events, self.stopping, self.options.keep_alive_seconds)
        try:
            await stream(request.scope, receive, send)
        finally:
            if stream.left_early and _is_on(query, "cancel_on_disconnect"):
                _log.info("request_cancelled_on_disconnect", uid=uid)
                with anyio.CancelScope(shield=True):
                    await self.frontend.cancel(uid)

    async def result(self, request: Request, receive: Receive, send: Send) -> None:
        """A request's result."""
        uid = _uid(request)
        keep = _is_on(_query(request, "keep"), "keep") or request.method == "HEAD"
        stream = await self.frontend.result(uid)
        headers = {"ETag": f'"{uid}"', "Vary": "Accept", "Cache-Control": "no-store"}
        sent_whole = await self._send_converted(request, stream, headers, receive, send)
        if sent_whole is None:
            sent_whole = await self._send_stored(request, stream, headers, receive, send)
        if sent_whole and not keep:
            await self._purge_sent(uid)

    async def _send_converted(
        self, request: Request, stream: ResultStream, headers: Mapping[str, str], receive: Receive, send: Send
    ) -> bool | None:
        """Send the result in another form; None if it is to be sent as it is stored."""
        accept = request.headers.get("accept")
        if not is_converted(stream, accept, self.options.convert_bytes_max):
            return None
        with self.budget.take(2 * stream.total_bytes):  # the stored form and the other one
            converted = await convert(stream, accept)
            if converted is None:
                return None
            response = Response(converted.body, 200, dict(headers), converted.content_type)
            await response(request.scope, receive, send)
        return True

    async def _send_stored(
        self, request: Request, stream: ResultStream, headers: Mapping[str, str], receive: Receive, send: Send
    ) -> bool:
        wanted = request.headers.get("range")
        if request.headers.get("if-range", headers["ETag"]) != headers["ETag"]:
            wanted = None
        response = ResultResponse(stream, parse_range(wanted, stream.total_bytes), headers)
        await response(request.scope, receive, send)
        return response.sent and response.span is None

    async def _purge_sent(self, uid: str) -> None:
        """Purge what was sent; the client has its answer, so that failing here is only logged."""
        try:
            await self.frontend.purge(uid)
        except OnePieceError as error:
            _log.warning("result_not_purged", uid=uid, error=error.message)

    async def purge(self, request: Request) -> Response:
        """Drop a result that was fetched."""
        await self.frontend.purge(_uid(request))
        return Response(status_code=204)

    async def workflows(self, request: Request) -> Response:
        """What can be submitted, with the types of inputs."""
        known = self.frontend.workflows()
        described = [to_plain(describe_workflow(known[name])) for name in sorted(known)]
        return JSONResponse({"workflows": described})

    async def nodes(self, request: Request) -> Response:
        """The members of the set."""
        return JSONResponse({"nodes": [to_plain(view) for view in self.frontend.nodes()]})

    async def node(self, request: Request) -> Response:
        """One member, and what it waits for if it drains."""
        return JSONResponse(to_plain(await self.frontend.node(request.path_params["node"])))

    async def placement(self, request: Request) -> Response:
        """What the manager wants to run where, what does, and the moves."""
        return JSONResponse(to_plain(await self.frontend.placement()))

    async def admission(self, request: Request) -> Response:
        """What this proxy lets in, and why it refuses."""
        return JSONResponse(to_plain(self.frontend.admission()))

    async def drain(self, request: Request) -> Response:
        """Let a node take no new work."""
        view = await self.frontend.set_draining(request.path_params["node"], draining=True)
        return JSONResponse(to_plain(view))

    async def resume(self, request: Request) -> Response:
        """Let a node take work again."""
        view = await self.frontend.set_draining(request.path_params["node"], draining=False)
        return JSONResponse(to_plain(view))

    async def health(self, request: Request) -> Response:
        """Whether the process does its work; a supervisor restarts it if not."""
        readiness = self.frontend.readiness()
        return JSONResponse({"live": readiness.live}, 200 if readiness.live else 503)

    async def readiness(self, request: Request) -> Response:
        """Whether requests can be served; a balancer sends them elsewhere if not."""
        readiness = self.frontend.readiness()
        if starved := why_none_are_left():
            readiness = evolve(readiness, ready=False, waiting_for=[*readiness.waiting_for, starved])
        if readiness.ready and not readiness.draining:
            return JSONResponse(to_plain(readiness))
        waiting_for = "; ".join(readiness.waiting_for) or ("draining" if readiness.draining else "starting")
        plain = NotReady(f"not ready: {waiting_for}").to_wire() | to_plain(readiness)
        return JSONResponse(plain, 503, {"Retry-After": "1"})


@define
class _Endpoint:
    """A route's end that sends its response itself: it gets ``receive`` and ``send``."""

    handle: Any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        await self.handle(Request(scope), receive, send)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404, "there is no such path")


def _uid(request: Request) -> str:
    uid: str = request.path_params["uid"]
    if not is_uid(uid):
        raise UnknownRequest(f"{uid[:60]!r} is no UID of a request", uid=uid[:60])
    return uid


def _query(request: Request, *known: str) -> dict[str, str]:
    for name in request.query_params:
        if name not in known:
            raise InvalidInput(
                f"unknown query parameter {name[:60]!r}; known: {', '.join(known)}", field=name[:60]
            )
    return dict(request.query_params)


def _is_on(query: Mapping[str, str], name: str) -> bool:
    text = query.get(name, "0")
    if text not in {"0", "1", "false", "true"}:
        raise InvalidInput(f"{name} is {text[:40]!r}: give 1 or 0", field=name)
    return text in {"1", "true"}
