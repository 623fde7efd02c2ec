"""Keys of exports that adapters can read, and how reads are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transports import tcp_frames as frames
from transports.errors import ExportGone
from transports.ring.offers import KEY_BYTES_MAX
from transports.verbs_pulls import Part, long_key, parts_of, plain_key, windows_of

PARTS = st.builds(
    Part,
    address=st.integers(1, (1 << 64) - (1 << 34)),
    length=st.integers(1, 1 << 34),
    key=st.integers(0, (1 << 32) - 1),
)


@given(st.lists(PARTS, min_size=1, max_size=11), st.integers(0, 1 << 40))
def test_keys_are_read_as_they_were_written(parts: list[Part], number: int) -> None:
    """Eleven parts have room in a key."""
    length = sum(part.length for part in parts)
    plain = frames.export_key(number, length)
    key = long_key(plain, parts)
    assert len(key) <= KEY_BYTES_MAX
    assert plain_key(key) == plain
    assert parts_of(key, length) == parts
    with pytest.raises(ExportGone, match="not the"):
        parts_of(key, length + 1)
    with pytest.raises(ExportGone, match="none of this"):
        parts_of(key + b"?", length)


def test_a_plain_key_has_no_parts() -> None:
    """The connection has such an export."""
    assert parts_of(frames.export_key(3, 77), 77) == []


def test_empty_parts_are_none_of_ours() -> None:
    """A read of nothing would be answered by nobody."""
    with pytest.raises(ExportGone):
        parts_of(long_key(frames.export_key(1, 5), [Part(1, 5, 1), Part(9, 0, 1)]), 5)


@pytest.mark.parametrize("address", [(1 << 64) - 1, (1 << 64) - 4])
def test_parts_end_where_addresses_do(address: int) -> None:
    """A part that would go on behind the largest address is no memory of anybody's."""
    with pytest.raises(ExportGone):
        parts_of(long_key(frames.export_key(1, 5), [Part(address, 5, 1)]), 5)
    last = [Part((1 << 64) - 5, 5, 1)]
    assert parts_of(long_key(frames.export_key(1, 5), last), 5) == last


@given(
    st.lists(st.builds(Part, st.integers(1, 1 << 40), st.integers(1, 3000), st.integers(0, 9)), min_size=1),
    st.integers(1, 1000),
    st.integers(1, 64),
)
def test_windows_cover_everything_in_order(parts: list[Part], piece_bytes: int, pieces_max: int) -> None:
    """No piece is longer, no window larger than allowed; together they are the parts, byte for byte."""
    windows = windows_of(parts, piece_bytes, pieces_max)
    assert all(0 < len(window) <= pieces_max for window in windows)
    pieces = [piece for window in windows for piece in window]
    assert all(0 < piece.length <= piece_bytes for piece in pieces)
    joined: list[Part] = []
    for piece in pieces:
        if joined and (last := joined[-1]).key == piece.key and last.address + last.length == piece.address:
            joined[-1] = Part(last.address, last.length + piece.length, last.key)
        else:
            joined.append(piece)
    whole: list[Part] = []
    for part in parts:
        if whole and (last := whole[-1]).key == part.key and last.address + last.length == part.address:
            whole[-1] = Part(last.address, last.length + part.length, last.key)
        else:
            whole.append(part)
    assert joined == whole
