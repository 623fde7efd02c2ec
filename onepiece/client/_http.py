"""The owner of httpx: calls to the proxies of a set, with their errors turned into ours.

Several proxies may be named. Calls go to one of them until it does not answer; then the next one has its
turn. A request belongs to the proxy that accepted it, or that adopted it when that one died; any other
answers with 307 and the owner's address, which is followed.

Two kinds of failure are told apart. *Nobody answers*: each proxy is tried ``attempts`` times. *The set
answers, but not for this request*: its owner has just died, say, and another proxy is about to adopt it.
That takes some seconds, for which a call waits if it is about a request: ``patience_seconds``.
"""

import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import anyio
import httpx
from attrs import define, field, frozen

from onepiece.client.api import strict_json
from onepiece.errors import ConfigError, NodeUnreachable, NotReady, OnePieceError

ANSWER_BYTES_MAX: Final = 64 << 20
"""The largest JSON answer; results are streamed and have their own bound."""
PAUSE_SECONDS: Final = 0.05
PAUSE_SECONDS_MAX: Final = 2.0
REDIRECTS_MAX: Final = 4
_REDIRECT: Final = 307

Body: TypeAlias = Callable[[], AsyncIterator[bytes]]
Response: TypeAlias = httpx.Response


@frozen
class ClientOptions:
    """How patient a client is."""

    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 60.0
    """How long a proxy may be silent; it sends something on each stream of events more often."""
    attempts: int = 4
    """How often each proxy is tried if none is reached; every call is safe to repeat."""
    patience_seconds: float = 60.0
    """How long a request may be nobody's, behind the death of its owner, before a call about it fails."""
    result_bytes_max: int = 4 << 30
    """The largest result that is read into memory; ``save`` has no such bound."""
    tenant: str = ""
    """On whose behalf requests are submitted; a full set is shared fairly between tenants."""
    tries_other_sets: bool = True
    """Whether a request that a set refuses as too much is submitted to the other sets that it names."""
    tls_authority: str | None = None
    """A PEM file of the authority that signed the proxy's certificate; the system's if not given."""


@define(eq=False)
class ProxyConnection:
    """Calls the proxies of one set; connections are pooled."""

    urls: Sequence[str]
    options: ClientOptions
    _http: httpx.AsyncClient = field(repr=False)
    _current: int = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, options: ClientOptions) -> "AsyncIterator[ProxyConnection]":
        """Make the pool; nothing is sent yet.

        Raises:
            ConfigError: A URL or the authority's file is unusable.
        """
        urls = tuple(_checked(each.strip()) for each in url.split(","))
        timeout = httpx.Timeout(options.read_timeout_seconds, connect=options.connect_timeout_seconds)
        # trust_env off: a web proxy of the environment does not lead to the cluster's own addresses.
        async with httpx.AsyncClient(
            timeout=timeout, trust_env=False, verify=_verification(urls, options)
        ) as http:
            yield cls(urls, options, http)

    @property
    def url(self) -> str:
        """The proxy that calls go to now."""
        return self.urls[self._current]

    def of_other_set(self, url: str) -> "ProxyConnection":
        """Calls to the proxy of another set, over the same pool; raises ``ConfigError``."""
        return ProxyConnection((_checked(url),), self.options, self._http)

    def turn_from(self, url: object) -> None:
        """Let another proxy have its turn, unless that has happened since this one failed."""
        if url == self.url:
            self._current = (self._current + 1) % len(self.urls)

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        uid: str | None = None,
    ) -> Any:
        """Call, again if nobody answers, and give the JSON that came; None if there is none.

        Args:
            method: Of HTTP.
            path: Below the proxy's URL.
            query: Its parameters.
            headers: Further ones.
            body: Called for each attempt.
            uid: The request that the call is about; the call waits for it to have an owner.

        Raises:
            NodeUnreachable: Nobody answered, however often it was tried.
            OnePieceError: What the proxy answered.
        """
        persistence = Persistence(self, waits_for_owner=uid is not None)
        while True:
            try:
                async with self.stream(method, path, query=query, headers=headers, body=body) as response:
                    return await self._answer(response)
            except (NodeUnreachable, NotReady) as error:
                await persistence.failed(error)

    async def _answer(self, response: Response) -> Any:
        data = bytearray()
        async for piece in response.aiter_bytes():
            data += piece
            if len(data) > ANSWER_BYTES_MAX:
                raise OnePieceError(f"{response.url} answered more than {ANSWER_BYTES_MAX} bytes")
        return self._json(response, data) if data else None

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
            NodeUnreachable: Nobody answered, or the connection broke; ``fields["url"]`` says who, and
                ``fields["is_owner"]`` whether another proxy had named it as the request's owner.
            OnePieceError: What the proxy answered.
        """
        asked = f"{self.url}{path}"
        if query:
            asked = f"{asked}?{httpx.QueryParams(query)}"
        for hop in range(REDIRECTS_MAX):
            async with self._once(method, asked, headers, body, is_owner=hop > 0) as response:
                if response.status_code != _REDIRECT:
                    yield response
                    return
                asked = _redirected(response)
        raise NodeUnreachable(
            f"{REDIRECTS_MAX} proxies in a row named another one as the owner, the last {asked}",
            url=asked,
            is_owner=True,
        )

    @asynccontextmanager
    async def _once(
        self, method: str, url: str, headers: Mapping[str, str] | None, body: Body | None, *, is_owner: bool
    ) -> AsyncIterator[Response]:
        if self._http.is_closed:
            raise OnePieceError("the client is closed: use it in the block that opened it")
        content = None if body is None else body()
        try:
            async with self._http.stream(method, url, headers=headers, content=content) as response:
                if response.is_error:
                    await self._raise(response)
                yield response
        except httpx.TransportError as error:
            why = str(error) or type(error).__name__
            place = url.partition("/v1/")[0]
            raise NodeUnreachable(
                f"{place} does not answer ({why}): is a node with the role proxy running there?",
                url=place,
                is_owner=is_owner,
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
                f"{response.url} answered {response.status_code} with {kind[:60]}: "
                "is it a proxy of onepiece?",
                url=str(response.url),
                status=response.status_code,
            )
        return found


@define(eq=False)
class Persistence:
    """Whether a call that failed is made again: see the module's text."""

    connection: ProxyConnection
    waits_for_owner: bool
    _unreached: int = 0
    _failures: int = 0
    """In a row, of both kinds."""
    _since: float | None = None
    """Since when the set answered, but not for this request."""

    def succeeded(self) -> None:
        """It went well for a while: what fails later is another failure."""
        self._unreached, self._failures, self._since = 0, 0, None

    async def failed(self, error: NodeUnreachable | NotReady) -> None:
        """Wait until it makes sense to try again; raises the error if it does not."""
        options, proxies = self.connection.options, len(self.connection.urls)
        self._failures += 1
        is_owner = isinstance(error, NotReady) or bool(error.fields.get("is_owner"))
        if is_owner:
            if not self.waits_for_owner:
                raise error
            now = anyio.current_time()
            self._since = now if self._since is None else self._since
            if now >= self._since + options.patience_seconds:
                raise error
        else:
            self._unreached += 1
            if self._unreached >= options.attempts * proxies:
                raise error
        self.connection.turn_from(error.fields.get("url", self.connection.url))
        await pause(self._failures // proxies)


async def pause(attempt: int) -> None:
    """Wait before the next attempt: longer each time, and not all clients at once."""
    seconds = min(PAUSE_SECONDS_MAX, PAUSE_SECONDS * 2.0**attempt)
    await anyio.sleep(seconds * random.uniform(0.5, 1.0))  # noqa: S311 - spreads clients, keeps no secret


def _redirected(response: Response) -> str:
    """Where a proxy says that the request's owner is."""
    target = response.headers.get("Location", "")
    if not target.startswith(("http://", "https://")):
        raise OnePieceError(
            f"{response.url} answered {response.status_code} with the location {target[:200]!r}: "
            "is it a proxy of onepiece?"
        )
    return str(target)


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"the proxy's URL {url!r} is unusable: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"the proxy's URL is {url!r}: give one as http://host:{port or 7080}")
    return url.rstrip("/")


def _verification(urls: Sequence[str], options: ClientOptions) -> ssl.SSLContext | bool:
    if not any(url.startswith("https:") for url in urls):
        return False  # there is nothing to verify, and reading the system's authorities takes time
    try:
        return ssl.create_default_context(cafile=options.tls_authority)
    except OSError as error:
        raise ConfigError(f"the authority's file {options.tls_authority!r} is unusable: {error}") from error
