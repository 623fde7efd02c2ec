"""The outermost layer of a proxy's HTTP side: every error becomes one JSON object, none leaks code.

A rejected request may have a body that nobody read, and a connection that is closed on unread bytes
is reset, which can cost the client its answer. So what comes behind the answer is read away, and kept
nowhere. If that is at most ``discard_bytes_max`` the connection goes on; a longer body, one of unknown
length, one behind which the client wants to close, and one whose sender waits for ``100 Continue`` end it,
all but the last after some lingering.
"""

import math
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar
from urllib.parse import parse_qs

import anyio
from attrs import define, field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from onepiece.client.api import REDIRECT_PARAMETER, to_plain
from onepiece.errors import NotReady, OnePieceError, Overloaded, OwnedElsewhere
from onepiece.log import get_logger
from onepiece.node.http_options import ProxyOptions

T = TypeVar("T")
RETRY_STATUSES: Final = frozenset({429, 503})
RETRY_AFTER_SECONDS: Final = 1.0
"""Where the error does not say when to come again."""
LINGER_SECONDS: Final = 2.0
"""How long a connection that ends is read from, for its client to see why."""

_log = get_logger(part="proxy")


@define
class _Exchange:
    """One request and what has been seen of it."""

    receive: Receive
    send: Send
    body_read: bool = False
    response_started: bool = False

    async def receiving(self) -> Any:
        """Receive, and note the body's end."""
        message = await self.receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self.body_read = True
        return message

    async def sending(self, message: Any) -> None:
        """Send, and note the response's start."""
        self.response_started = True
        await self.send(message)


@define
class ErrorBoundary:
    """An ASGI application around another one: bounds how many requests are handled, answers errors."""

    application: ASGIApp
    options: ProxyOptions
    in_progress: int = field(default=0, init=False)
    refused: int = field(default=0, init=False)
    """Requests that were too many at once."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; what it raises becomes its answer."""
        assert scope["type"] == "http", f"only http is served, not {scope['type']}"
        exchange = _Exchange(receive, send, body_read=scope["method"] in {"GET", "HEAD", "DELETE"})
        self.in_progress += 1
        try:
            self._check_room()
            await self.application(scope, exchange.receiving, exchange.sending)
        except ClientDisconnect:
            return  # nobody is there to be told
        except anyio.get_cancelled_exc_class() as error:
            # The server stops and does not wait any longer: the client should hear why, and go elsewhere.
            with anyio.move_on_after(LINGER_SECONDS, shield=True):
                stopping = NotReady("the proxy stops; ask another one")
                await self._answer(exchange, scope, stopping.http_status, stopping.to_wire(), error)
            raise
        except OwnedElsewhere as error:
            headers = {"Location": f"{error.fields['http']}{_target(scope)}"}
            await self._answer(exchange, scope, error.http_status, error.to_wire(), error, headers)
        except Overloaded as error:
            target = self._other_set(scope, error)
            if target is None:
                await self._answer(exchange, scope, error.http_status, error.to_wire(), error)
            else:
                await self._answer(exchange, scope, 307, error.to_wire(), error, {"Location": target})
        except OnePieceError as error:
            await self._answer(exchange, scope, error.http_status, error.to_wire(), error)
        except HTTPException as error:
            await self._answer(
                exchange, scope, error.status_code, _wire_of(error, scope), error, error.headers
            )
        except Exception as error:  # noqa: BLE001 - told as what it is
            # A result or a stream is sent by several tasks: what one of them raised is no bug for that.
            await self._failed(exchange, scope, _sole(error))
        finally:
            self.in_progress -= 1

    async def _failed(self, exchange: _Exchange, scope: Scope, error: BaseException) -> None:
        """Tell an error of ours as it is, and a bug without its insides, which are logged."""
        if isinstance(error, OnePieceError):
            await self._answer(exchange, scope, error.http_status, error.to_wire(), error)
        else:
            number = secrets.token_hex(4)
            _log.error(
                "http_request_failed",
                method=scope["method"],
                path=scope["path"],
                number=number,
                exc_info=error,
            )
            message = f"the proxy failed on this request; its log has the cause under number={number}"
            await self._answer(exchange, scope, 500, OnePieceError(message, number=number).to_wire(), error)

    def _other_set(self, scope: Scope, error: Overloaded) -> str | None:
        """Where a refused request is sent on to; that set does not send it on again."""
        elsewhere = error.fields.get("elsewhere") or ()
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        if not self.options.redirects_refused or not elsewhere or query.get(REDIRECT_PARAMETER) == ["0"]:
            return None
        target = f"{elsewhere[0]}{_target(scope)}"
        return f"{target}{'&' if '?' in target else '?'}{REDIRECT_PARAMETER}=0"

    def _check_room(self) -> None:
        if self.in_progress > self.options.requests_max:
            self.refused += 1
            raise Overloaded(
                f"the proxy handles {self.options.requests_max} HTTP requests already: try again later",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )

    async def _answer(
        self,
        exchange: _Exchange,
        scope: Scope,
        status: int,
        wire: Mapping[str, Any],
        error: BaseException,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if exchange.response_started:
            # The client has a status already. The server ends a connection whose response is left
            # incomplete, and that is what shows the client that the body is not whole.
            cause = None if isinstance(error, OnePieceError) else error  # else it says enough
            _log.warning(
                "http_response_broken_off", path=scope["path"], why=str(error)[:1000], exc_info=cause
            )
            return
        headers = dict(headers or {})
        if status in RETRY_STATUSES:
            headers["Retry-After"] = _retry_after(wire["fields"].get("retry_after_seconds"))
        asked = {name.lower(): value for name, value in scope["headers"]}
        goes_on = self._is_short(asked) and not _is_last(scope, asked)
        ends = not exchange.body_read and (b"expect" in asked or not goes_on)
        if ends:
            headers["Connection"] = "close"
        response = JSONResponse(to_plain(wire), status, headers)
        if not ends or b"expect" in asked:
            await response(scope, exchange.receive, exchange.sending)
            return
        start = {"type": "http.response.start", "status": status, "headers": response.raw_headers}
        await exchange.send(start)
        await exchange.send({"type": "http.response.body", "body": response.body, "more_body": True})
        await self._read_away(exchange.receive)
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})

    def _is_short(self, asked: Mapping[bytes, bytes]) -> bool:
        """Whether the server will have read the body away in bounded time (which it does by itself)."""
        length = asked.get(b"content-length", b"")
        return length.isdigit() and int(length) <= self.options.discard_bytes_max

    async def _read_away(self, receive: Receive) -> None:
        seen = 0
        with anyio.move_on_after(LINGER_SECONDS):
            while seen < self.options.discard_bytes_max:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                seen += len(message["body"])


def _sole(error: BaseException) -> BaseException:
    """What a group holds, if that is one error."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _is_last(scope: Scope, asked: Mapping[bytes, bytes]) -> bool:
    """Whether the server closes the connection behind its answer, and reads no body away before."""
    tokens = {token.strip().lower() for token in asked.get(b"connection", b"").split(b",")}
    return b"close" in tokens or scope.get("http_version") == "1.0"


@asynccontextmanager
async def closing(iterator: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close an iterator of the node's when the block ends, if it can be closed."""
    try:
        yield iterator
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            with anyio.CancelScope(shield=True):
                await close()


async def wait_gone(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _retry_after(seconds: Any) -> str:
    """The header's value; a stage may have raised the error, and have put anything there."""
    is_number = isinstance(seconds, int | float) and math.isfinite(seconds)
    return str(max(1, math.ceil(seconds if is_number else RETRY_AFTER_SECONDS)))


def _target(scope: Scope) -> str:
    """Path and query of a request, as they came."""
    query = scope.get("query_string", b"").decode("latin-1")
    path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
    return f"{path}?{query}" if query else path


def _wire_of(error: HTTPException, scope: Scope) -> dict[str, Any]:
    """The router's own refusals, in the form of ours."""
    message = f"{scope['method']} {scope['path'][:200]}: {error.detail}"
    return OnePieceError(message, path=scope["path"][:200]).to_wire()
