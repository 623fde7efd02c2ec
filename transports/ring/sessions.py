"""Who is connected to an inbox, under which number, and how far each producer has come.

A producer has an *identity* that outlives its connections; each connection is a *session* with a
number, under which its slots are written and its delivered word is found. Messages are counted by
identity, so that one that comes again in a new session is known.

A session that has ended may have left committed slots behind, so its number goes on meaning the same
identity until the cursor has passed everything that it can have reserved: the tail at any moment
after its end. Only then may the number be given away again.

::

    free --open--> open --close--> closed --tail seen--> bounded --cursor passed the bound--> free
"""

from collections import deque

from attrs import define

from transports.errors import TransportError
from transports.ring.layout import Geometry


class SessionsExhausted(TransportError):  # noqa: N818  # named by what happened, as in transports.errors
    """Every session of the inbox is in use, or its end is not yet behind the cursor: try again."""

    retryable = True


@define
class Identity:
    """A producer across its sessions."""

    name: str
    next_number: int = 0
    """How many of its messages were handed over: the number that comes next."""
    session: int | None = None
    """The open session, if there is one."""


@define
class Session:
    """One connection of an identity."""

    identity: Identity
    open: bool = True
    bound: int | None = None
    """Once closed and the tail was seen: nothing of it is reserved at or after this sequence."""


class SessionTable:
    """The sessions of one inbox; knows no memory.

    Args:
        geometry: of the inbox.
        identities_max: how many identities are remembered, sessions aside.
    """

    def __init__(self, geometry: Geometry, identities_max: int) -> None:
        self._geometry = geometry
        self._identities_max = identities_max
        self.identities: dict[str, Identity] = {}
        """In the order of their last opening."""
        self.sessions: dict[int, Session] = {}
        """By number, open or not yet free."""
        self.closing: list[int] = []
        """Numbers of closed sessions that are not yet free."""
        self.free: deque[int] = deque(range(1, geometry.session_count + 1))

    def session_of(self, name: str) -> int | None:
        """The open session of an identity."""
        known = self.identities.get(name)
        return known.session if known else None

    def sessions_below(self, name: str) -> tuple[int, ...]:
        """The open sessions of an identity, and of those whose names go on behind it with a slash."""
        return tuple(
            number
            for number, session in self.sessions.items()
            if session.open and f"{session.identity.name}/".startswith(f"{name}/")
        )

    def open_numbers(self) -> tuple[int, ...]:
        """The numbers of all open sessions."""
        return tuple(number for number, session in self.sessions.items() if session.open)

    def open(self, name: str) -> tuple[int, int]:
        """Give an identity a session; returns its number and how many messages were handed over.

        Raises:
            SessionsExhausted: no number is free.
        """
        assert self.session_of(name) is None, f"{name!r} still has an open session: fence it first"
        if not self.free:
            raise SessionsExhausted(
                f"all {self._geometry.session_count} sessions of this inbox are in use: try again later, "
                "or give the inbox a larger session_count"
            )
        number = self.free.popleft()
        known = self.identities.pop(name, None) or Identity(name)
        self._forget_the_oldest()
        self.identities[name] = known
        known.session = number
        self.sessions[number] = Session(known)
        return number, known.next_number

    def close(self, number: int) -> None:
        """A session has ended and nothing of it can land any more; unknown ones are no error."""
        session = self.sessions.get(number)
        if session is None or not session.open:
            return
        session.open = False
        session.identity.session = None
        self.closing.append(number)

    def passed(self, tail_sequence: int, cursor_sequence: int) -> tuple[int, ...]:
        """The closed sessions of which nothing is left before the cursor.

        Args:
            tail_sequence: of a tail that was read just now.
            cursor_sequence: everything before it was looked at.
        """
        done = []
        for number in self.closing:
            session = self.sessions[number]
            if session.bound is None:
                session.bound = tail_sequence
            ahead = (session.bound - cursor_sequence) % self._geometry.sequence_modulus
            if not 0 < ahead <= self._geometry.slot_count:
                done.append(number)
        return tuple(done)

    def make_free(self, number: int) -> None:
        """The number of a passed session may be given away again."""
        self.closing.remove(number)
        del self.sessions[number]
        self.free.append(number)

    def _forget_the_oldest(self) -> None:
        if len(self.identities) < self._identities_max:
            return
        needed = {session.identity.name for session in self.sessions.values()}
        for name in self.identities:
            if name not in needed:
                del self.identities[name]
                return
