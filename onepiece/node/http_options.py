"""Bounds of a proxy's HTTP side, and the budget for bodies that are being read."""

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
from attrs import define, field, frozen

from onepiece.errors import ConfigError, Overloaded

MEBIBYTE = 1 << 20


@frozen
class ProxyOptions:
    """Bounds of one proxy.

    Raises:
        ConfigError: A bound is not positive, or smaller than what it must hold.
    """

    body_bytes_max: int = 256 * MEBIBYTE
    """The largest body of one request."""
    json_bytes_max: int = 16 * MEBIBYTE
    """The largest JSON, if a body may be that large; larger inputs go as multipart, or from our client."""
    bodies_bytes_max: int = field()
    """What all bodies being read and results being converted may take together; beyond it: rejected."""
    body_timeout_seconds: float = 300.0
    """How long a body may take to arrive."""
    discard_bytes_max: int = 64 * MEBIBYTE
    """The body of a rejected request is read away up to this size, so that its sender gets to read why;
    a larger one loses its connection."""
    requests_max: int = 2048
    """HTTP requests in progress at once, streams of events included."""
    keep_alive_seconds: float = 15.0
    """A stream of events in which nothing happens gets a comment this often."""
    convert_bytes_max: int = 64 * MEBIBYTE
    """The largest result that is converted for a client that does not take it as it is stored."""

    redirects_refused: bool = False
    """A request that is refused as too much is answered by 307 to another set, if one is known."""

    @bodies_bytes_max.default
    def _some_bodies(self) -> int:
        return 4 * self.body_bytes_max

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if value <= 0 and value is not False:
                raise ConfigError(f"the proxy's {name} is {value!r}: give a number above 0")
        if self.bodies_bytes_max < self.body_bytes_max:
            raise ConfigError(
                f"the proxy's bodies_bytes_max is {self.bodies_bytes_max!r}: it must hold one body of "
                f"body_bytes_max, {self.body_bytes_max}"
            )


@define
class BodyBudget:
    """What bodies in memory take together; counted before they are read."""

    bytes_max: int
    _in_use: int = field(default=0, init=False)

    @property
    def in_use(self) -> int:
        """What is taken now."""
        return self._in_use

    @contextmanager
    def take(self, body_bytes: int) -> Iterator[None]:
        """Have room for a body while the block lasts.

        Raises:
            Overloaded: There is none.
        """
        if self._in_use + body_bytes > self.bytes_max:
            raise Overloaded(
                f"a body of {body_bytes} bytes finds {self._in_use} of {self.bytes_max} bytes for bodies in "
                "use: send it again later",
                retry_after_seconds=1.0,
            )
        self._in_use += body_bytes
        try:
            yield
        finally:
            self._in_use -= body_bytes
            assert self._in_use >= 0, "more room was given back than taken"
