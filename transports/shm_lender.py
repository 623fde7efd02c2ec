"""The socket at which producers of the same host get a region's memory, and by which they are known to live.

Its name is abstract: nothing lies in a directory, and only processes of the same network namespace can
find it, which are those that reach the owner's port without leaving the host. Who comes presents the
token that its session was given over the connection, behind both proofs of the secret; it gets the
memory's descriptor, once.

The visit stays open as a *lifeline*. A producer closes its end when it will not write any more; the
kernel does so for one that has died, behind taking its memory away. So the end of a lifeline says that
nothing of this session can land.
"""

import asyncio
import logging
import os
import secrets
import socket
import struct
from typing import Final, Protocol

from transports.errors import ProtocolError

_LOG: Final = logging.getLogger(__name__)

TOKEN_BYTES: Final = 16
NAME_BYTES_MAX: Final = 100
"""Of a socket; the system allows 107."""

_BACKLOG: Final = 128
_VISITS_MAX: Final = 4096
_TOKEN_SECONDS: Final = 5.0
"""How long a visitor may take to present its token."""
_ACCEPT_PAUSE_SECONDS: Final = 0.1
_CREDENTIALS: Final = struct.Struct("3i")


class Borrower(Protocol):
    """A session that may have its region's memory."""

    def borrow(self, visit: "Visit") -> int:
        """The descriptor to be given away; raises ``ProtocolError``. From now on its producer may write."""
        ...

    def let_go(self) -> None:
        """The lifeline has ended: the producer does not write any more."""
        ...

    def misbehaved(self, error: ProtocolError) -> None:
        """Its producer said what a lifeline does not carry."""
        ...


class Lender:
    """The socket of one listener; raises ``OSError`` where there cannot be one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.name: Final = f"onepiece-{secrets.token_hex(16)}"
        self._awaited: dict[bytes, Borrower] = {}
        self._visits: set[Visit] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._server.setblocking(False)
            self._server.bind(f"\0{self.name}")
            self._server.listen(_BACKLOG)
        except BaseException:
            self._server.close()
            raise
        self._loop.add_reader(self._server.fileno(), self._acceptable)

    def expect(self, borrower: Borrower) -> bytes:
        """A token for this session."""
        token = secrets.token_bytes(TOKEN_BYTES)
        self._awaited[token] = borrower
        return token

    def withdraw(self, token: bytes) -> None:
        """The session is over; its token is worth nothing any more."""
        self._awaited.pop(token, None)

    def claim(self, token: bytes) -> Borrower | None:
        """The session that has this token, which is used up."""
        return self._awaited.pop(token, None)

    def forget(self, visit: "Visit") -> None:
        """The visit is over."""
        self._visits.discard(visit)

    def close(self) -> None:
        """Close the socket and every lifeline."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._server.fileno())
        self._server.close()
        for visit in list(self._visits):
            visit.close()

    def _acceptable(self) -> None:
        for _ in range(_BACKLOG):
            try:
                connection, _nameless = self._server.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors, as a rule; the visitor stays in the backlog meanwhile.
                _LOG.warning("no memory can be lent: %s", error)
                self._loop.remove_reader(self._server.fileno())
                self._timer = self._loop.call_later(_ACCEPT_PAUSE_SECONDS, self._accept_again)
                return
            if len(self._visits) >= _VISITS_MAX or _user_of(connection) not in {os.geteuid(), 0}:
                connection.close()
                continue
            self._visits.add(Visit(self, connection))

    def _accept_again(self) -> None:
        self._timer = None
        self._loop.add_reader(self._server.fileno(), self._acceptable)


class Visit:
    """One visitor's connection: first a token, then nothing but its end."""

    def __init__(self, lender: Lender, connection: socket.socket) -> None:
        self._lender = lender
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._borrower: Borrower | None = None
        self._closed = False
        connection.setblocking(False)
        self._timer = self._loop.call_later(_TOKEN_SECONDS, self.close)
        self._loop.add_reader(connection.fileno(), self._readable)

    def close(self) -> None:
        """End the visit; what becomes of the session is the caller's business. Idempotent."""
        if not self._closed:
            self._closed = True
            self._timer.cancel()
            self._loop.remove_reader(self._connection.fileno())
            self._connection.close()
            self._lender.forget(self)

    def _readable(self) -> None:
        try:
            said = self._connection.recv(TOKEN_BYTES + 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            said = b""
        if self._borrower is None:
            self._lend(said)
        elif said:
            self.close()
            self._borrower.misbehaved(ProtocolError("bytes on a lifeline, which carries none"))
        else:
            self.close()
            self._borrower.let_go()

    def _lend(self, token: bytes) -> None:
        borrower = self._lender.claim(token)
        if borrower is None:
            self.close()
            return
        try:
            descriptor = borrower.borrow(self)
        except ProtocolError:
            self.close()
            return
        self._timer.cancel()
        self._borrower = borrower
        try:
            socket.send_fds(self._connection, [b"\0"], [descriptor])
        except OSError:  # it is gone already
            self.close()
            borrower.let_go()


def _user_of(connection: socket.socket) -> int:
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1])
