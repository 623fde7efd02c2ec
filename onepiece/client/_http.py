"""The owner of httpx: calls to one proxy, with its errors turned into ours."""

import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import anyio
import httpx
from attrs import define, field, frozen

from onepiece.client.api import strict_json
from onepiece.errors import ConfigError, NodeUnreachable, OnePieceError

ANSWER_BYTES_MAX: Final = 64 << 20
"""The largest JSON answer; results are streamed and have their own bound."""
PAUSE_SECONDS: Final = 0.05
PAUSE_SECONDS_MAX: Final = 2.0

Body: TypeAlias = Callable[[], AsyncIterator[bytes]]
Response: TypeAlias = httpx.Response


@frozen
class ClientOptions:
    """How patient a client is."""

    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 60.0
    """How long a proxy may be silent; it sends something on each stream of events more often."""
    attempts: int = 4
    """How often a call is made in all if the proxy is not reached; every call is safe to repeat."""
    result_bytes_max: int = 4 << 30
    """The largest result that is read into memory; ``save`` has no such bound."""
    tls_authority: str | None = None
    """A PEM file of the authority that signed the proxy's certificate; the system's if not given."""


@define(eq=False)
class ProxyConnection:
    """Calls one proxy; connections are pooled."""

    url: str
    options: ClientOptions
    _http: httpx.AsyncClient = field(repr=False)

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, options: ClientOptions) -> "AsyncIterator[ProxyConnection]":
        """Make the pool; nothing is sent yet.

        Raises:
            ConfigError: The URL or the authority's file is unusable.
        """
        url = _checked(url)
        timeout = httpx.Timeout(options.read_timeout_seconds, connect=options.connect_timeout_seconds)
        # trust_env off: a web proxy of the environment does not lead to the cluster's own addresses.
        async with httpx.AsyncClient(
            base_url=url, timeout=timeout, trust_env=False, verify=_verification(url, options)
        ) as http:
            yield cls(url, options, http)

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
    ) -> Any:
        """Call, again if nobody answers, and give the JSON that came; None if there is none.

        Raises:
            NodeUnreachable: Nobody answered, however often it was tried.
            OnePieceError: What the proxy answered.
        """

        async def once() -> Any:
            async with self.stream(method, path, query=query, headers=headers, body=body) as response:
                data = bytearray()
                async for piece in response.aiter_bytes():
                    data += piece
                    if len(data) > ANSWER_BYTES_MAX:
                        raise OnePieceError(f"{self.url} answered more than {ANSWER_BYTES_MAX} bytes")
                return self._json(response, data) if data else None

        return await self.repeat(once)

    async def repeat(self, once: Callable[[], Any]) -> Any:
        """Do something that is safe to repeat, until the proxy is reached or patience ends."""
        for attempt in range(self.options.attempts - 1):
            try:
                return await once()
            except NodeUnreachable:
                await pause(attempt)
        return await once()

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
    ) -> AsyncIterator[Response]:
        """Call once; the answer's body is not read yet. What breaks inside the block is told as ours.

        Raises:
            NodeUnreachable: Nobody answered, or the connection broke.
            OnePieceError: What the proxy answered.
        """
        content = None if body is None else body()
        try:
            async with self._http.stream(
                method, path, params=query, headers=headers, content=content
            ) as response:
                if response.is_error:
                    await self._raise(response)
                yield response
        except httpx.TransportError as error:
            why = str(error) or type(error).__name__
            raise NodeUnreachable(
                f"{self.url} does not answer ({why}): is a node with the role proxy running there?",
                url=self.url,
            ) from error

    async def _raise(self, response: Response) -> None:
        data = bytearray()
        async for piece in response.aiter_bytes():
            data += piece
            if len(data) > ANSWER_BYTES_MAX:
                break
        wire = self._json(response, data)
        error = OnePieceError.from_wire(wire)
        seconds = response.headers.get("Retry-After", "")
        if seconds.isdigit():
            error.fields.setdefault("retry_after_seconds", float(seconds))
        raise error

    def _json(self, response: Response, data: bytearray) -> Any:
        """The JSON of an answer; an object, as all answers of a proxy are."""
        try:
            found = strict_json(data)
        except ValueError:
            found = None
        if not isinstance(found, dict) or (response.is_error and "error" not in found):
            kind = response.headers.get("Content-Type", "nothing")
            raise OnePieceError(
                f"{self.url} answered {response.status_code} with {kind[:60]}: is it a proxy of onepiece?",
                url=self.url,
                status=response.status_code,
            )
        return found


async def pause(attempt: int) -> None:
    """Wait before the next attempt: longer each time, and not all clients at once."""
    seconds = min(PAUSE_SECONDS_MAX, PAUSE_SECONDS * 2.0**attempt)
    await anyio.sleep(seconds * random.uniform(0.5, 1.0))  # noqa: S311 - spreads clients, keeps no secret


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"the proxy's URL {url!r} is unusable: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"the proxy's URL is {url!r}: give one as http://host:{port or 7080}")
    return url.rstrip("/")


def _verification(url: str, options: ClientOptions) -> ssl.SSLContext | bool:
    if not url.startswith("https:"):
        return False  # there is nothing to verify, and reading the system's authorities takes time
    try:
        return ssl.create_default_context(cafile=options.tls_authority)
    except OSError as error:
        raise ConfigError(f"the authority's file {options.tls_authority!r} is unusable: {error}") from error
