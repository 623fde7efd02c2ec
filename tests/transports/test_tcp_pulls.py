"""Both ends of a pull over a connection, without the connection: what is asked for, answered, and refused."""

import asyncio
from collections.abc import Sequence

import pytest

from transports import tcp_frames as frames
from transports.errors import ExportGone, PeerLost, ProtocolError
from transports.operations import Bytes
from transports.tcp_frames import Header, Kind
from transports.tcp_pulls import Lending, Pulls


def header(kind: Kind, *, tag: int = 0, body: int = 0, a: int = 0, b: int = 0, c: int = 0) -> Header:
    """A frame's header."""
    return Header(kind, 0, 0, tag, body, a, b, c)


def sent_header(buffers: Sequence[Bytes]) -> Header:
    """The header of what was put on the connection."""
    return Header._make(frames._HEADER.unpack(buffers[0]))


class Ends:
    """An owner and a producer that hand frames to each other."""

    def __init__(self) -> None:
        self.asked: list[Header] = []
        self.pulls = Pulls(lambda buffers: self.asked.append(sent_header(buffers)))
        self.sent: list[Sequence[Bytes]] = []
        self.has_room = True
        self.lending = Lending(self.sent.append, lambda: self.has_room)

    def deliver(self) -> None:
        """Carry everything over, both ways."""
        while self.asked or self.sent:
            while self.asked:
                self.lending.asked(self.asked.pop(0))
            while self.sent:
                said, *parts = self.sent.pop(0)
                answer = sent_header([said])
                if answer.kind == Kind.PULLED:
                    place = self.pulls.place(answer)
                    if place is not None:
                        place[:] = b"".join(parts)
                self.pulls.answered(answer)


@pytest.mark.parametrize("offset", [0, 1, 3, 6, 9])
@pytest.mark.parametrize("length", [0, 1, 4, 9])
def test_cut_is_a_slice_of_the_whole(offset: int, length: int) -> None:
    """Whatever buffers it goes across; what lies behind the end is missing."""
    buffers = [memoryview(part) for part in (b"abc", b"", b"d", b"efghi")]
    assert b"".join(frames.cut(buffers, offset, length)) == b"abcdefghi"[offset : offset + length]


async def test_many_parts_are_asked_for_a_few_at_a_time() -> None:
    """And all of them come to their place."""
    ends = Ends()
    body = bytes(range(256)) * (4 * frames.PULL_BYTES_MAX // 256) * 2
    into = memoryview(bytearray(len(body)))
    pulling = asyncio.ensure_future(ends.pulls.pull(ends.lending.export([body[:7], body[7:]]), into))
    while not pulling.done():
        await asyncio.sleep(0)
        assert len(ends.asked) <= frames.PULLS_OPEN_MAX
        ends.deliver()
    await pulling
    assert into == body


async def test_a_full_connection_holds_answers_back() -> None:
    """Until it takes them; a producer that is asked for more than it keeps ends the session."""
    ends = Ends()
    key = ends.lending.export([b"body"])
    number, _ = frames.parse_export_key(key)
    ends.has_room = False
    for tag in range(64):
        ends.lending.asked(header(Kind.PULL, tag=tag, a=number, c=4))
    with pytest.raises(ProtocolError, match="beside 64 others"):
        ends.lending.asked(header(Kind.PULL, tag=64, a=number, c=4))
    assert ends.sent == []
    ends.has_room = True
    ends.lending.answer()
    assert len(ends.sent) == 64


async def test_only_what_is_lent_is_sent() -> None:
    """Other numbers, places outside of it, what was withdrawn or has ended: gone."""
    ends = Ends()
    key = ends.lending.export([b"body"])
    number, _ = frames.parse_export_key(key)
    for a, b, c in ((number + 1, 0, 4), (number, 1, 4), (number, 1 << 60, 1), (number, 0, 0)):
        ends.lending.asked(header(Kind.PULL, a=a, b=b, c=c))
        assert sent_header(ends.sent.pop()).kind == Kind.GONE
    ends.lending.asked(header(Kind.PULL, a=number, b=1, c=3))
    assert b"".join(ends.sent.pop()[1:]) == b"ody"
    ends.lending.withdraw(key)
    ends.lending.asked(header(Kind.PULL, a=number, c=4))
    assert sent_header(ends.sent.pop()).kind == Kind.GONE
    with pytest.raises(ProtocolError, match="a pull of"):
        ends.lending.asked(header(Kind.PULL, a=number, c=frames.PULL_BYTES_MAX + 1))


async def test_answers_that_nobody_asked_for_are_refused() -> None:
    """Unknown tags, other lengths, a second answer; and keys that are none."""
    ends = Ends()
    with pytest.raises(ProtocolError, match="key has"):
        await ends.pulls.pull(b"short", memoryview(bytearray(4)))
    with pytest.raises(ExportGone):
        await ends.pulls.pull(frames.export_key(0, 5), memoryview(bytearray(4)))
    pulling = asyncio.ensure_future(ends.pulls.pull(frames.export_key(0, 4), memoryview(bytearray(4))))
    await asyncio.sleep(0)
    (asked,) = ends.asked
    for bad in (header(Kind.PULLED, tag=asked.tag + 1, body=4), header(Kind.PULLED, tag=asked.tag, body=3)):
        with pytest.raises(ProtocolError, match="not asked for"):
            ends.pulls.place(bad)
    with pytest.raises(ProtocolError, match="nobody has asked"):
        ends.pulls.answered(header(Kind.GONE, tag=asked.tag + 1))
    ends.pulls.answered(header(Kind.GONE, tag=asked.tag))
    with pytest.raises(ProtocolError, match="a second answer"):
        ends.pulls.answered(header(Kind.GONE, tag=asked.tag))
    with pytest.raises(ExportGone):
        await pulling


async def test_a_session_that_ends_ends_its_pulls() -> None:
    """With its reason; and a cancelled pull leaves its late answer nowhere to go."""
    ends = Ends()
    key = ends.lending.export([b"body"])
    cancelled = asyncio.ensure_future(ends.pulls.pull(key, memoryview(bytearray(4))))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    (asked,) = ends.asked
    assert ends.pulls.place(header(Kind.PULLED, tag=asked.tag, body=4)) is None
    ends.deliver()
    pulling = asyncio.ensure_future(ends.pulls.pull(key, memoryview(bytearray(4))))
    await asyncio.sleep(0)
    ends.pulls.fail(PeerLost("gone"))
    with pytest.raises(PeerLost, match="gone"):
        await pulling
