"""The socket at which producers of the same host get a region's memory, and by which they are known to live.

Its name is abstract: nothing lies in a directory, and only processes of the same network namespace can
find it, which are those that reach the owner's port without leaving the host. Who comes presents the
token that its session was given over the connection, behind both proofs of the secret; it gets the
memory's descriptor, once. It also says where that token lies in its own memory: if the owner can read it
there, it will fetch large messages itself (``process_memory``), and the visitor is told so. Whose memory that
is says the kernel, not the visitor.

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
from transports.process_memory import OtherMemory

_LOG: Final = logging.getLogger(__name__)

TOKEN_BYTES: Final = 16
TOKEN: Final = struct.Struct(f"<{TOKEN_BYTES}sQ")
"""What a visitor says: its token, and where that lies in its memory; 0: nobody is to read there."""
LENT: Final = b"\0"
LENT_AND_READ: Final = b"\1"
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
        """The descriptor to be given away; raises ``ProtocolError``. From now on its producer may write.

        Where ``visit.memory`` is not None the producer's memory may be read.
        """
        ...

    def let_go(self) -> None:
        """The lifeline has ended: the producer does not write any more."""
        ...

    def misbehaved(self, error: ProtocolError) -> None:
        """Its producer said what a lifeline does not carry."""
        ...


class Lender:
    """The socket of one listener; raises ``OSError`` where there cannot be one.

    Args:
        reads: Whether visitors' memory is read where that can be.
    """

    def __init__(self, *, reads: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.reads: Final = reads
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
        self.memory: OtherMemory | None = None
        """The visitor's, if it can be read."""
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
            said = self._connection.recv(TOKEN.size + 1)
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

    def _lend(self, said: bytes) -> None:
        token, address = TOKEN.unpack(said) if len(said) == TOKEN.size else (said, 0)
        borrower = self._lender.claim(token)
        if borrower is None:
            self.close()
            return
        if self._lender.reads and address:
            memory = OtherMemory(_process_of(self._connection))
            self.memory = memory if memory.holds(token, address) else None
        try:
            descriptor = borrower.borrow(self)
        except ProtocolError:
            self.close()
            return
        self._timer.cancel()
        self._borrower = borrower
        try:
            socket.send_fds(self._connection, [LENT if self.memory is None else LENT_AND_READ], [descriptor])
        except OSError:  # it is gone already
            self.close()
            borrower.let_go()


def _user_of(connection: socket.socket) -> int:
    return _credentials(connection)[1]


def _process_of(connection: socket.socket) -> int:
    """As it is called here; 0 where it is out of sight."""
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, ...]:
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(told)
