"""How a session ends: once, for one reason, and every later call is told the same."""

from attrs import define

from transports.errors import TransportError


@define
class Ending:
    """Remembers why a session is over; the first reason stays."""

    _reason: TransportError | None = None

    def over(self) -> bool:
        """The session is over."""
        return self._reason is not None

    def reach(self, reason: TransportError) -> bool:
        """End for ``reason``; False if it was over before."""
        if self._reason is not None:
            return False
        self._reason = reason
        return True

    def check(self) -> None:
        """Raise the reason if the session is over."""
        if self._reason is not None:
            raise self.error()

    def error(self) -> TransportError:
        """The reason, as a new exception: one instance raised twice would mix two tracebacks."""
        assert self._reason is not None
        error = type(self._reason)(*self._reason.args)
        error.__cause__ = self._reason.__cause__
        return error
