"""The frames of the tcp transport: their bytes, both ways, without any I/O.

One header for all, then a body::

     0  u8   kind
     1  u8   flags      NOTIFY: wake the owner; SECRET: this side has a cluster secret;
                        LENDS: the owner has memory that processes of its host can map;
                        CLAIMS: the owner executes claims; TAKEN: the claim took place
     2  u16  writes     of a guarded chain
     4  u32  tag        answers carry the tag of their question
     8  u64  body       bytes that follow the header
    16  u64  a          }
    24  u64  b          }  see the table
    32  u64  c          }

=========  ======  ================  ============  =========  ======================================
frame      from    a                 b             c          body
=========  ======  ================  ============  =========  ======================================
HELLO      prod.   magic             wire version             32 B nonce, u16 length + region, hello
CHALLENGE  owner                                              32 B nonce
PROOF      prod.                                              32 B proof
WELCOME    owner   session           region bytes  guarded    32 B proof, welcome
REFUSED    owner   reason's code                              reason (UTF-8)
WRITE      prod.   offset                                     the bytes, received into the region
READ       prod.   offset            length
SWAP       prod.   offset            expected      desired
ADD        prod.   offset            addend
CLAIM      prod.   length
GUARDED    prod.   offset            expected      desired    writes x (u64 offset, u64 length), bytes
GUARD      prod.   offset            expected      desired    the same without bytes: WRITEs follow
FLUSH      prod.
LISTEN     prod.   nudges seen
ATTACH     prod.
WIRE       prod.                                              what carries the writes (UTF-8)
LANDED     prod.
PULLED     prod.                                              the bytes, received where they belong
GONE       prod.
WORD       owner   the word found    nudges
DATA       owner                     nudges                   the bytes
CLAIMED    owner   the tail found    nudges        the head   u64 delivered
NUDGE      owner                     nudges
ATTACHED   owner   memory's address  key length    device     16 B doorbell, key, what is about a device
                                                   length     (none: 0 B), worker's address;
                                                              or 16 B token, socket's name
PULL       owner   export            offset        length
ENDED      owner   reason's code                              reason (UTF-8)
BEAT       both
=========  ======  ================  ============  =========  ======================================

An owner whose WELCOME has no CLAIMS is asked for none: it ends a session that sends a CLAIM. A CLAIM is for
the session of its connection.

Operations of one connection are carried out in the order of their frames. Every length is checked
against the bound of its kind before anything is stored; what a bound does not allow, and what is
not in the table of the state the connection is in, is a ``ProtocolError``.

ATTACH, WIRE, LANDED and ATTACHED are for sessions whose writes go beside this connection. ``ucx`` has all
of them; ``tcp`` asks, on the owner's own host, once for a token and a socket to have its memory from.

PULL asks for a part of what the producer has exported; PULLED or GONE is the answer, with its tag.

A small chain behind a swap comes in one GUARDED frame. A larger one comes as a GUARD and as many WRITE
frames as it names: their bytes are received into the region, or, if the swap did not take place, dropped.

``FrameReader`` takes bytes in pieces of any size. It says where the next ones belong: into a small
scratch buffer, or, for a body that has a place of its own (WRITE, DATA, PULLED), straight into that place.
"""

import enum
import hashlib
import hmac
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from transports.errors import HttpAnswered, LayoutMismatch, ProtocolError
from transports.operations import Bytes, Chain, Claimed, Guarded, Write

WIRE_VERSION: Final = 2
MAGIC: Final = int.from_bytes(b"1PC-TCP\n", "little")

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
NAME_BYTES_MAX: Final = 512
HELLO_BYTES_MAX: Final = 2048
"""The layer above's hello or welcome."""
REASON_BYTES_MAX: Final = 2048
READ_BYTES_MAX: Final = 1 << 20
GUARDED_FRAME_BYTES_MAX: Final = 16 << 10
"""Largest chain that travels in one frame with its swap: a small message is one frame and its answer."""
GUARDED_BYTES_MAX: Final = (1 << 20) + (64 << 10)
"""Largest chain behind a swap, a MiB and a header: what is sent in vain when another producer was faster."""
CHAIN_WRITES_MAX: Final = 16
PULL_BYTES_MAX: Final = 4 << 20
"""The largest part of an export that one PULL asks for."""
PULLS_OPEN_MAX: Final = 4
"""Parts that are asked for at a time, so that the producer never waits for the next question."""

NOTIFY: Final = 1
SECRET: Final = 2
LENDS: Final = 4
CLAIMS: Final = 8
TAKEN: Final = 16

_HEADER: Final = struct.Struct("<BBHIQQQQ")
_PLACE: Final = struct.Struct("<QQ")
_NAME: Final = struct.Struct("<H")
_KEY: Final = struct.Struct("<QQ")
_WORD: Final = struct.Struct("<Q")
EXPORT_KEY_BYTES: Final = _KEY.size
HEADER_BYTES: Final = _HEADER.size

_SCRATCH_BYTES: Final = 64 << 10
_NOTHING: Final = memoryview(b"")


class Kind(enum.IntEnum):
    """What a frame says."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    WRITE = 16
    READ = 17
    SWAP = 18
    ADD = 19
    GUARDED = 20
    FLUSH = 21
    LISTEN = 22
    GUARD = 23
    ATTACH = 24
    WIRE = 25
    LANDED = 26
    PULLED = 27
    GONE = 28
    CLAIM = 29
    WORD = 32
    DATA = 33
    NUDGE = 34
    ENDED = 35
    ATTACHED = 36
    PULL = 37
    CLAIMED = 38
    BEAT = 48


class Header(NamedTuple):
    """The fixed part of a frame."""

    kind: int
    flags: int
    writes: int
    tag: int
    body: int
    a: int
    b: int
    c: int


Bounds = Mapping[int, int]
"""For each kind of frame that may come now, the largest body it may have."""

_TABLE_BYTES_MAX: Final = CHAIN_WRITES_MAX * _PLACE.size
_PLACED_BODY_MAX: Final = 1 << 40  # the place has the real bound

OWNER_EXPECTS_HELLO: Final[Bounds] = {Kind.HELLO: NONCE_BYTES + 2 + NAME_BYTES_MAX + HELLO_BYTES_MAX}
OWNER_EXPECTS_PROOF: Final[Bounds] = {Kind.PROOF: PROOF_BYTES}
OWNER_EXPECTS_NOTHING: Final[Bounds] = {}
OWNER_EXPECTS_OPERATIONS: Final[Bounds] = {
    Kind.WRITE: _PLACED_BODY_MAX,
    Kind.READ: 0,
    Kind.SWAP: 0,
    Kind.ADD: 0,
    Kind.CLAIM: 0,
    Kind.GUARDED: GUARDED_FRAME_BYTES_MAX + _TABLE_BYTES_MAX,
    Kind.GUARD: _TABLE_BYTES_MAX,
    Kind.FLUSH: 0,
    Kind.LISTEN: 0,
    Kind.PULLED: PULL_BYTES_MAX,
    Kind.GONE: 0,
    Kind.BEAT: 0,
}
PRODUCER_EXPECTS_CHALLENGE: Final[Bounds] = {
    Kind.CHALLENGE: NONCE_BYTES,
    Kind.REFUSED: REASON_BYTES_MAX,
}
PRODUCER_EXPECTS_WELCOME: Final[Bounds] = {
    Kind.WELCOME: PROOF_BYTES + HELLO_BYTES_MAX,
    Kind.REFUSED: REASON_BYTES_MAX,
}
PRODUCER_EXPECTS_ANSWERS: Final[Bounds] = {
    Kind.WORD: 0,
    Kind.DATA: READ_BYTES_MAX,
    Kind.CLAIMED: _WORD.size,
    Kind.NUDGE: 0,
    Kind.PULL: 0,
    Kind.ENDED: REASON_BYTES_MAX,
    Kind.BEAT: 0,
}


class FrameReader:
    """Cuts a stream into frames; ``bounds`` may be changed between two frames.

    Args:
        bounds: What may come.
        place: Where the body of a WRITE, DATA or PULLED frame belongs; exactly as long as the body. None
            drops it; raises ``ProtocolError`` if there must be no such body.
    """

    def __init__(self, bounds: Bounds, place: Callable[[Header], memoryview | None]) -> None:
        self.bounds = bounds
        self._place = place
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._start = 0
        self._filled = 0
        self._placed: Header | None = None
        self._rest = _NOTHING
        self._dropping = 0

    @property
    def in_frame(self) -> bool:
        """Part of a frame was received, and part of it not."""
        return self._placed is not None or self._filled > self._start

    def next_buffer(self) -> memoryview:
        """Where the next bytes belong; never empty, once ``frames`` has been iterated to its end."""
        if self._placed is not None:
            return self._rest if len(self._rest) else self._scratch[: self._dropping]
        if self._start:
            remaining = self._filled - self._start
            self._scratch[:remaining] = self._scratch[self._start : self._filled]
            self._start, self._filled = 0, remaining
        return self._scratch[self._filled :]

    def place_again(self) -> None:
        """What ``place`` gave has moved, with its bytes: the rest of a body goes to where it is now."""
        if self._placed is not None and len(self._rest):
            place = self._place(self._placed)
            assert place is not None
            self._rest = place[len(place) - len(self._rest) :]

    def received(self, count: int) -> None:
        """Take note of ``count`` bytes put into ``next_buffer``."""
        if self._placed is None:
            self._filled += count
        elif self._dropping:
            self._dropping -= count
        else:
            self._rest = self._rest[count:]

    def frames(self) -> Iterator[tuple[Header, memoryview]]:
        """The frames that are complete; whoever stops in between may go on with a new iteration.

        Bodies without a place of their own are views of the scratch buffer, valid until the next step
        of the iteration.

        Raises:
            ProtocolError: The bytes follow no rule; nothing more can be read from this stream.
        """
        if self._placed is not None:
            if len(self._rest) or self._dropping:
                return
            header, self._placed = self._placed, None
            yield header, _NOTHING
        while self._filled - self._start >= HEADER_BYTES:
            header = self._header(self._start)
            after = self._start + HEADER_BYTES
            if header.kind in _PLACED:
                taken = min(header.body, self._filled - after)
                place = self._place(header)
                if place is not None:
                    assert len(place) == header.body
                    place[:taken] = self._scratch[after : after + taken]
                self._start = after + taken
                if taken < header.body:
                    self._placed = header
                    # The scratch buffer is empty now, and takes what is to be dropped.
                    self._start = self._filled = 0
                    self._rest = _NOTHING if place is None else place[taken:]
                    self._dropping = header.body - taken if place is None else 0
                    return
                yield header, _NOTHING
            elif self._filled - after >= header.body:
                self._start = after + header.body
                yield header, self._scratch[after : self._start]
            else:
                return

    def _header(self, start: int) -> Header:
        header = Header._make(_HEADER.unpack_from(self._scratch, start))
        bound = self.bounds.get(header.kind)
        if bound is None:
            if bytes(self._scratch[start : start + 2]) in _TLS_RECORDS:
                raise ProtocolError("the peer encrypts, and we do not; give both sides certificates, or none")
            if header.kind not in _NAMES:
                begins = bytes(self._scratch[start : start + HEADER_BYTES])
                stranger = f"the peer is no OnePiece node, or one of another version: it sent {begins!r}"
                if begins.startswith(b"HTTP/"):
                    hint = "this is where it serves HTTP; name the address that it listens on for nodes"
                    raise HttpAnswered(f"{stranger}; {hint}")
                raise ProtocolError(f"{stranger}; is this the address that it listens on for nodes?")
            raise ProtocolError(f"a frame of kind {_name(header.kind)} has no business here")
        if header.body > bound:
            raise ProtocolError(
                f"a {_name(header.kind)} frame of {header.body} bytes; at most {bound} are allowed"
            )
        return header


_TLS_RECORDS: Final = frozenset({b"\x15\x03", b"\x16\x03"})
"""How an alert and a handshake of TLS begin, which no frame does."""

_PLACED: Final = frozenset({int(Kind.WRITE), int(Kind.DATA), int(Kind.PULLED)})
_NAMES: Final = {int(kind): kind.name for kind in Kind}


def _name(kind: int) -> str:
    return _NAMES.get(kind, f"{kind:#x}")


def frame(
    kind: Kind,
    *,
    flags: int = 0,
    writes: int = 0,
    tag: int = 0,
    body: int = 0,
    a: int = 0,
    b: int = 0,
    c: int = 0,
) -> bytes:
    """The header of a frame whose ``body`` bytes are sent behind it."""
    return _HEADER.pack(kind, flags, writes, tag, body, a, b, c)


def chain_frames(chain: Chain) -> list[Bytes]:
    """One WRITE for each write, as buffers to be sent one after the other; the last one notifies."""
    buffers: list[Bytes] = []
    writes = chain.writes or (Write(0, ()),)
    last = writes[-1]
    for write in writes:
        flags = NOTIFY if chain.notify and write is last else 0
        buffers.append(frame(Kind.WRITE, flags=flags, body=write.length, a=write.offset))
        buffers.extend(write.buffers)
    return buffers


def guarded_frames(tag: int, guarded: Guarded) -> list[Bytes]:
    """A swap and the chain behind it, as buffers to be sent one after the other."""
    swap, chain = guarded.swap, guarded.chain
    table = b"".join([_PLACE.pack(write.offset, write.length) for write in chain.writes])
    length = sum([write.length for write in chain.writes])
    whole = length <= GUARDED_FRAME_BYTES_MAX
    header = frame(
        Kind.GUARDED if whole else Kind.GUARD,
        flags=NOTIFY if whole and chain.notify else 0,
        writes=len(chain.writes),
        tag=tag,
        body=len(table) + length if whole else len(table),
        a=swap.offset,
        b=swap.expected,
        c=swap.desired,
    )
    if whole:
        return [header + table, *(buffer for write in chain.writes for buffer in write.buffers)]
    return [header + table, *chain_frames(chain)]


def claimed_frame(tag: int, claimed: Claimed, nudges: int) -> bytes:
    """The answer to a CLAIM, whole."""
    header = frame(
        Kind.CLAIMED,
        flags=TAKEN if claimed.taken else 0,
        tag=tag,
        body=_WORD.size,
        a=claimed.tail,
        b=nudges,
        c=claimed.head,
    )
    return header + _WORD.pack(claimed.delivered)


def parse_claimed(header: Header, body: memoryview) -> Claimed:
    """Read ``claimed_frame``; raises ``ProtocolError``."""
    if len(body) != _WORD.size:
        raise ProtocolError(f"the answer to a claim has a body of {len(body)} bytes")
    (delivered,) = _WORD.unpack(body)
    return Claimed(header.a, header.c, delivered, taken=bool(header.flags & TAKEN))


def parse_places(writes: int, body: memoryview) -> list[tuple[int, int]]:
    """The offsets and lengths at the start of a GUARDED or GUARD body; raises ``ProtocolError``."""
    if writes > CHAIN_WRITES_MAX or writes * _PLACE.size > len(body):
        raise ProtocolError(f"a body of {len(body)} bytes cannot name {writes} writes")
    return [_PLACE.unpack_from(body, index * _PLACE.size) for index in range(writes)]


def parse_chain(writes: int, body: memoryview) -> list[tuple[int, memoryview]]:
    """The offsets and bytes of a GUARDED frame; raises ``ProtocolError``."""
    at = writes * _PLACE.size
    chain = []
    for offset, length in parse_places(writes, body):
        if length > len(body) - at:
            raise ProtocolError(f"a guarded write of {length} bytes, of which {len(body) - at} came")
        chain.append((offset, body[at : at + length]))
        at += length
    if at != len(body):
        raise ProtocolError(f"a guarded frame has {len(body) - at} bytes that belong to no write")
    return chain


def export_key(number: int, length: int) -> bytes:
    """The key of a producer's export."""
    return _KEY.pack(number, length)


def parse_export_key(key: bytes) -> tuple[int, int]:
    """Number and length of an export; raises ``ProtocolError``."""
    if len(key) != _KEY.size:
        raise ProtocolError(f"an export's key has {_KEY.size} bytes, not {len(key)}")
    number, length = _KEY.unpack(key)
    return number, length


def cut(buffers: Sequence[memoryview], offset: int, length: int) -> list[Bytes]:
    """Bytes ``offset`` to ``offset + length`` of the concatenation of ``buffers``, without copying."""
    parts: list[Bytes] = []
    for buffer in buffers:
        if offset < len(buffer) and length:
            parts.append(part := buffer[offset : offset + length])
            length -= len(part)
        offset = max(0, offset - len(buffer))
    return parts


class Introduction(NamedTuple):
    """The body of a HELLO."""

    nonce: bytes
    region: str
    hello: bytes


def hello_frame(introduction: Introduction, *, has_secret: bool) -> bytes:
    """A HELLO, whole; raises ``ValueError`` if a part is too long for it."""
    name = introduction.region.encode()
    if len(name) > NAME_BYTES_MAX or len(introduction.hello) > HELLO_BYTES_MAX:
        raise ValueError(
            f"a region's name has at most {NAME_BYTES_MAX} bytes and a hello {HELLO_BYTES_MAX}, not"
            f" {len(name)} and {len(introduction.hello)}"
        )
    assert len(introduction.nonce) == NONCE_BYTES
    body = introduction.nonce + _NAME.pack(len(name)) + name + introduction.hello
    flags = SECRET if has_secret else 0
    return frame(Kind.HELLO, flags=flags, body=len(body), a=MAGIC, b=WIRE_VERSION) + body


def parse_hello(header: Header, body: memoryview) -> Introduction:
    """Read a HELLO; raises ``ProtocolError`` or ``LayoutMismatch``."""
    if header.a != MAGIC:
        raise ProtocolError("the peer does not speak this protocol")
    if header.b != WIRE_VERSION:
        raise LayoutMismatch(
            f"the producer speaks wire version {header.b}, the owner {WIRE_VERSION}; run the same release"
        )
    if len(body) < NONCE_BYTES + _NAME.size:
        raise ProtocolError(f"a HELLO of {len(body)} bytes is too short")
    (length,) = _NAME.unpack_from(body, NONCE_BYTES)
    after = NONCE_BYTES + _NAME.size
    if length > len(body) - after:
        raise ProtocolError(f"a region's name of {length} bytes, of which {len(body) - after} came")
    try:
        region = str(body[after : after + length], "utf-8")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"the region's name is no UTF-8: {error}") from error
    return Introduction(bytes(body[:NONCE_BYTES]), region, bytes(body[after + length :]))


class Proofs:
    """What each side computes from the secret and both nonces; the secret itself is never sent.

    The two labels keep a proof from being sent back to whoever made it. The introduction is covered, so
    that it cannot be exchanged on the way.
    """

    def __init__(self, secret: bytes | None, introduction: Introduction, owner_nonce: bytes) -> None:
        said = hashlib.sha256(introduction.region.encode() + b"\0" + introduction.hello).digest()
        talk = introduction.nonce + owner_nonce + said
        key = secret or b""
        self.producer: Final = hmac.digest(key, b"onepiece producer" + talk, "sha256")
        self.owner: Final = hmac.digest(key, b"onepiece owner" + talk, "sha256")
