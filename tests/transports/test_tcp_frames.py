"""The frames of the tcp transport, without a socket: both ways, in any pieces, and from hostile hands."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transports import tcp_frames as frames
from transports.errors import (
    AuthenticationFailed,
    HandshakeRefused,
    IdentityRefused,
    LayoutMismatch,
    PeerLost,
    ProtocolError,
    SessionFenced,
    TransportError,
    UnknownRegion,
)
from transports.operations import Bytes, Chain, Claimed, CompareAndSwap, Guarded, Write
from transports.tcp_frames import FrameReader, Header, Introduction, Kind
from transports.tcp_reasons import parse_reason, reason_frame

BYTES = st.binary(max_size=300)


class Region:
    """Where placed bodies go, and what came."""

    def __init__(self, bounds: frames.Bounds, size: int = 1 << 18) -> None:
        self.memory = bytearray(size)
        self.frames: list[tuple[Header, bytes]] = []
        self.reader = FrameReader(bounds, self._place)

    def _place(self, header: Header) -> memoryview:
        if header.a + header.body > len(self.memory):
            raise ProtocolError("outside")
        return memoryview(self.memory)[header.a : header.a + header.body]

    def feed(self, stream: bytes, pieces: Iterator[int]) -> None:
        """Give the stream in pieces of these lengths, as a socket would: never more than fits."""
        at = 0
        while at < len(stream):
            buffer = self.reader.next_buffer()
            assert len(buffer) > 0
            count = min(len(buffer), next(pieces), len(stream) - at)
            buffer[:count] = stream[at : at + count]
            at += count
            self.reader.received(count)
            self.frames.extend((header, bytes(body)) for header, body in self.reader.frames())


def joined(buffers: list[Bytes]) -> bytes:
    """What a socket would carry."""
    return b"".join(buffers)


def whole() -> Iterator[int]:
    """As large pieces as there is room for."""
    while True:
        yield 1 << 30


@settings(deadline=None)
@given(
    writes=st.lists(st.tuples(st.integers(0, 1 << 17), BYTES), min_size=1, max_size=6),
    large=st.integers(0, 1 << 17),
    seed=st.integers(0, 1 << 32),
    longest=st.sampled_from([1, 7, 64, 4096, 1 << 20]),
)
def test_any_pieces_give_the_same_frames(
    writes: list[tuple[int, bytes]], large: int, seed: int, longest: int
) -> None:
    """However a stream is cut, the frames, the bodies and the memory are the same as in one piece."""
    large = min(large, 1000 * longest)
    chain = Chain(
        (*(Write(offset, (data[:5], data[5:])) for offset, data in writes), Write(0, (b"L" * large,)))
    )
    guarded = Guarded(CompareAndSwap(8, 1, 2), Chain((Write(64, (b"guarded",)),)))
    stream = (
        joined(frames.chain_frames(chain))
        + frames.frame(Kind.READ, tag=7, a=3, b=4)
        + joined(frames.guarded_frames(9, guarded))
        + frames.frame(Kind.BEAT)
    )
    expected, cut = Region(frames.OWNER_EXPECTS_OPERATIONS), Region(frames.OWNER_EXPECTS_OPERATIONS)
    expected.feed(stream, whole())
    rng = random.Random(seed)
    cut.feed(stream, iter(lambda: rng.randint(1, longest), 0))
    assert cut.frames == expected.frames
    assert cut.memory == expected.memory
    assert not cut.reader.in_frame
    kinds = [header.kind for header, _ in cut.frames]
    assert kinds == [Kind.WRITE] * (len(writes) + 1) + [Kind.READ, Kind.GUARDED, Kind.BEAT]
    assert [header.flags for header, _ in cut.frames[: len(writes) + 1]] == [0] * len(writes) + [
        frames.NOTIFY
    ]
    for offset, data in writes[-1:]:
        if offset >= large:
            assert cut.memory[offset : offset + len(data)] == data


@settings(deadline=None)
@given(length=st.integers(0, 200_000), longest=st.sampled_from([1 << 10, 70_000, 1 << 20]))
def test_dropped_bodies_leave_no_trace(length: int, longest: int) -> None:
    """A body without a place is skipped, however long, and the frames behind it are read."""
    kinds = []
    reader = FrameReader(frames.OWNER_EXPECTS_OPERATIONS, lambda _: None)
    stream = joined(frames.chain_frames(Chain((Write(0, (b"x" * length,)),)))) + frames.frame(Kind.FLUSH)
    while stream:
        buffer = reader.next_buffer()
        count = min(len(buffer), longest, len(stream))
        buffer[:count], stream = stream[:count], stream[count:]
        reader.received(count)
        kinds += [header.kind for header, _ in reader.frames()]
    assert kinds == [Kind.WRITE, Kind.FLUSH]
    assert not reader.in_frame


@settings(deadline=None)
@given(stream=st.binary(min_size=frames.HEADER_BYTES, max_size=2000), longest=st.integers(1, 500))
def test_random_bytes_end_in_a_protocol_error_or_in_bounds(stream: bytes, longest: int) -> None:
    """Whatever bytes come, the reader raises ProtocolError or stays within its bounds; nothing else."""
    region = Region(frames.OWNER_EXPECTS_OPERATIONS)
    try:
        region.feed(stream, iter(lambda: longest, 0))
    except ProtocolError:
        return
    assert all(header.body <= frames.OWNER_EXPECTS_OPERATIONS[header.kind] for header, _ in region.frames)


@pytest.mark.parametrize(
    ("bounds", "header"),
    [
        (frames.OWNER_EXPECTS_HELLO, frames.frame(Kind.WRITE, body=8)),
        (frames.OWNER_EXPECTS_HELLO, frames.frame(Kind.HELLO, body=1 << 40)),
        (frames.OWNER_EXPECTS_PROOF, frames.frame(Kind.HELLO, body=8)),
        (frames.OWNER_EXPECTS_NOTHING, frames.frame(Kind.BEAT)),
        (frames.OWNER_EXPECTS_OPERATIONS, frames.frame(Kind.WORD)),
        (frames.OWNER_EXPECTS_OPERATIONS, frames.frame(Kind.SWAP, body=1)),
        (frames.OWNER_EXPECTS_OPERATIONS, frames.frame(Kind.GUARDED, body=1 << 20)),
        (frames.OWNER_EXPECTS_OPERATIONS, frames.frame(Kind.WRITE, a=(1 << 64) - 1, body=1)),
        (frames.OWNER_EXPECTS_OPERATIONS, frames.frame(Kind.WRITE, body=(1 << 64) - 1)),
        (frames.OWNER_EXPECTS_OPERATIONS, b"GET / HTTP/1.1\r\nHost: 127.0.0.1:7070\r\n\r\n"),
        (frames.PRODUCER_EXPECTS_ANSWERS, frames.frame(Kind.WRITE, body=8)),
        (frames.PRODUCER_EXPECTS_ANSWERS, frames.frame(Kind.DATA, body=1 << 30)),
        (frames.PRODUCER_EXPECTS_CHALLENGE, frames.frame(Kind.WELCOME)),
    ],
)
def test_what_the_state_does_not_allow(bounds: frames.Bounds, header: bytes) -> None:
    """A frame that does not belong here, or is too long, is refused at its header, before any body."""
    with pytest.raises(ProtocolError):
        Region(bounds).feed(header, whole())


def chain_body(*places: tuple[int, int], data: bytes) -> memoryview:
    """The body of a guarded frame."""
    table = b"".join(offset.to_bytes(8, "little") + length.to_bytes(8, "little") for offset, length in places)
    return memoryview(table + data)


@pytest.mark.parametrize(
    ("writes", "body"),
    [
        (17, chain_body(*[(0, 0)] * 17, data=b"")),
        (3, chain_body((0, 1), data=b"x")),
        (1, chain_body((0, 5), data=b"four")),
        (1, chain_body((0, 3), data=b"four")),
        (2, chain_body((0, 4), (0, (1 << 64) - 1), data=b"four")),
    ],
)
def test_hostile_chains(writes: int, body: memoryview) -> None:
    """A chain whose table and bytes do not agree is refused whole."""
    with pytest.raises(ProtocolError):
        frames.parse_chain(writes, body)


def test_chain_comes_back() -> None:
    """A chain of any writes is parsed into the same offsets and bytes."""
    chain = Chain((Write(64, (b"ab", b"", b"c")), Write(0, ()), Write(128, (memoryview(b"last"),))))
    region = Region(frames.OWNER_EXPECTS_OPERATIONS)
    region.feed(joined(frames.guarded_frames(3, Guarded(CompareAndSwap(8, 5, 6), chain))), whole())
    ((header, body),) = region.frames
    assert (header.tag, header.a, header.b, header.c) == (3, 8, 5, 6)
    parsed = frames.parse_chain(header.writes, memoryview(body))
    assert [(offset, bytes(data)) for offset, data in parsed] == [(64, b"abc"), (0, b""), (128, b"last")]


@settings(deadline=None)
@given(region=st.text(max_size=60), hello=BYTES, nonce=st.binary(min_size=32, max_size=32))
def test_hello_comes_back(region: str, hello: bytes, nonce: bytes) -> None:
    """An introduction is parsed into what was said; one byte missing is no introduction."""
    said = Introduction(nonce, region.encode("utf-8", "replace").decode(), hello)
    stream = frames.hello_frame(said, has_secret=True)
    reader = Region(frames.OWNER_EXPECTS_HELLO)
    reader.feed(stream, whole())
    ((header, body),) = reader.frames
    assert frames.parse_hello(header, memoryview(body)) == said
    assert header.flags == frames.SECRET
    with pytest.raises(ProtocolError):
        frames.parse_hello(header, memoryview(body)[: 33 + len(said.region.encode())])
    with pytest.raises(ProtocolError, match="does not speak"):
        frames.parse_hello(header._replace(a=1), memoryview(body))
    with pytest.raises(LayoutMismatch, match="version 99"):
        frames.parse_hello(header._replace(b=99), memoryview(body))


def test_too_long_introductions_are_not_sent() -> None:
    """A name or hello that the other side would refuse is refused where it is made."""
    with pytest.raises(ValueError, match="513"):
        frames.hello_frame(Introduction(bytes(32), "n" * 513, b""), has_secret=False)
    with pytest.raises(ValueError, match="2049"):
        frames.hello_frame(Introduction(bytes(32), "n", bytes(2049)), has_secret=False)


def test_proofs_depend_on_everything() -> None:
    """Another secret, nonce, region or hello gives other proofs; the two sides' proofs always differ."""
    base = Introduction(bytes(32), "region", b"hello")
    variants = [
        frames.Proofs(b"secret", base, b"n" * 32),
        frames.Proofs(b"Secret", base, b"n" * 32),
        frames.Proofs(None, base, b"n" * 32),
        frames.Proofs(b"secret", base, b"m" * 32),
        frames.Proofs(b"secret", base._replace(nonce=b"x" * 32), b"n" * 32),
        frames.Proofs(b"secret", base._replace(region="regiom"), b"n" * 32),
        frames.Proofs(b"secret", base._replace(hello=b"hellp"), b"n" * 32),
    ]
    said = [proof for proofs in variants for proof in (proofs.owner, proofs.producer)]
    assert len(set(said)) == len(said)


@pytest.mark.parametrize(
    "error",
    [HandshakeRefused, AuthenticationFailed, IdentityRefused, LayoutMismatch, UnknownRegion],
    ids=lambda kind: kind.__name__,
)
def test_refusals_come_back(error: type[TransportError]) -> None:
    """A refusal crosses the wire with its kind and its words, cut where it is too long."""
    assert crossed(Kind.REFUSED, error("why")) == (error, "why")
    kind, words = crossed(Kind.REFUSED, error("w" * 5000))
    assert (kind, len(words)) == (error, frames.REASON_BYTES_MAX)


@pytest.mark.parametrize("error", [PeerLost, SessionFenced, ProtocolError], ids=lambda kind: kind.__name__)
def test_endings_come_back(error: type[TransportError]) -> None:
    """So does why a session ended; what has no place there becomes PeerLost."""
    assert crossed(Kind.ENDED, error("why")) == (error, "why")
    assert crossed(Kind.ENDED, UnknownRegion("why")) == (PeerLost, "why")


def crossed(kind: Kind, error: TransportError) -> tuple[type[TransportError], str]:
    """What the other side is told."""
    region = Region({kind: frames.REASON_BYTES_MAX})
    region.feed(reason_frame(kind, error), whole())
    ((header, body),) = region.frames
    told = parse_reason(header, memoryview(body))
    return type(told), str(told)


@given(
    words=st.tuples(*[st.integers(0, (1 << 64) - 1)] * 3), taken=st.booleans(), nudges=st.integers(0, 1 << 63)
)
def test_answers_to_claims_come_back(words: tuple[int, int, int], taken: bool, nudges: int) -> None:
    """What the owner found is what the producer reads, and the nudges beside it."""
    region = Region(frames.PRODUCER_EXPECTS_ANSWERS)
    region.feed(frames.claimed_frame(5, Claimed(*words, taken=taken), nudges), whole())
    ((header, body),) = region.frames
    assert frames.parse_claimed(header, memoryview(body)) == Claimed(*words, taken=taken)
    assert (header.tag, header.b) == (5, nudges)


@pytest.mark.parametrize("body", [b"", bytes(7)])
def test_half_an_answer_to_a_claim_is_none(body: bytes) -> None:
    """A length that no such answer has is an error."""
    region = Region(frames.PRODUCER_EXPECTS_ANSWERS)
    region.feed(frames.frame(Kind.CLAIMED, body=len(body)) + body, whole())
    ((header, found),) = region.frames
    with pytest.raises(ProtocolError, match=f"a body of {len(body)} bytes"):
        frames.parse_claimed(header, memoryview(found))
