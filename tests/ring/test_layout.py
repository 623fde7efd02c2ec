import pytest
from hypothesis import given
from hypothesis import strategies as st

from transports.errors import LayoutMismatch
from transports.ring import Geometry
from transports.ring.layout import (
    GRANULE_BYTES,
    SLOT,
    StaleSnapshot,
    decode_slot,
    encode_slot,
    hash_payload,
    pack_position,
    unpack_position,
)

geometries = st.builds(
    Geometry,
    st.integers(1, 1 << 18),
    st.integers(1, 1 << 26).map(lambda granules: granules * GRANULE_BYTES),
    st.integers(1, 65535),
)


@given(geometries)
def test_blocks_follow_each_other_on_lines(geometry: Geometry) -> None:
    """Words, slots and payload stand one behind the other, on lines, and do not overlap."""
    last = geometry.session_count
    assert geometry.tail_offset == 64
    assert geometry.head_offset == 128
    assert geometry.delivered_offset(1) == 192
    assert geometry.delivered_offset(last) + 8 <= geometry.slots_start
    assert geometry.slots_start % 64 == 0
    assert geometry.slot_offset(geometry.slot_count - 1) + 64 == geometry.payload_start
    assert geometry.region_bytes == geometry.payload_start + geometry.payload_bytes


@given(geometries)
def test_counters_wrap_at_multiples_of_their_rings(geometry: Geometry) -> None:
    """The index stays right across the wrap, and a difference is never ambiguous."""
    assert geometry.sequence_modulus % geometry.slot_count == 0
    assert geometry.granule_modulus % geometry.granule_count == 0
    assert 4 * geometry.slot_count <= geometry.sequence_modulus <= 1 << 20
    assert 3 * geometry.granule_count <= geometry.granule_modulus <= 1 << 28


@given(st.integers(0, 65535), st.integers(0, (1 << 20) - 1), st.integers(0, (1 << 28) - 1))
def test_positions_survive_packing(session: int, sequence: int, end: int) -> None:
    """What is packed into a word comes out of it, whatever the other fields hold."""
    assert unpack_position(pack_position(session, sequence, end)) == (session, sequence, end)


@given(geometries, st.data())
def test_a_message_is_contiguous_and_starts_at_the_next_place(
    geometry: Geometry, data: st.DataObject
) -> None:
    """A message never crosses the end of the ring, and skips only if it would."""
    end = data.draw(st.integers(0, geometry.granule_modulus - 1))
    length = data.draw(st.integers(0, geometry.message_bytes_max))
    start, after = geometry.place(end, length)
    granules = -(-length // GRANULE_BYTES)
    assert (after - start) % geometry.granule_modulus == granules
    assert start % geometry.granule_count + granules <= geometry.granule_count
    if end % geometry.granule_count + granules <= geometry.granule_count:
        assert start == end
    else:
        assert start % geometry.granule_count == 0


def test_an_empty_ring_takes_any_message_that_fits_it() -> None:
    """A message as long as the payload ring finds room wherever the last one ended."""
    geometry = Geometry(4, 8 * GRANULE_BYTES, 1)
    for end in range(geometry.granule_count):
        position = pack_position(0, 0, end)
        assert geometry.reserve(position, position, geometry.payload_bytes, 1) is not None


def test_skipped_granules_count_until_they_are_released() -> None:
    """Behind a message that skipped the ring's end there is no room for what was skipped."""
    geometry = Geometry(4, 8 * GRANULE_BYTES, 1)
    head = pack_position(0, 0, 6)
    tail = geometry.reserve(head, head, 4 * GRANULE_BYTES, 1)
    assert tail is not None
    assert unpack_position(tail) == (1, 1, 12)
    assert geometry.reserve(tail, head, 2 * GRANULE_BYTES, 1) is not None
    assert geometry.reserve(tail, head, 3 * GRANULE_BYTES, 1) is None


def test_a_full_slot_ring_has_no_room() -> None:
    """The last slot can be taken, not one more."""
    geometry = Geometry(2, 8 * GRANULE_BYTES, 1)
    word = 0
    for _ in range(2):
        reserved = geometry.reserve(word, 0, 1, 1)
        assert reserved is not None
        word = reserved
    assert geometry.reserve(word, 0, 1, 1) is None


def test_room_is_computed_across_the_wrap_of_both_counters() -> None:
    """Just before the wrap a ring has as much room as anywhere else."""
    geometry = Geometry(3, 5 * GRANULE_BYTES, 1)
    word = start = pack_position(0, geometry.sequence_modulus - 1, geometry.granule_modulus - 1)
    for granules in (1, 2, 2):
        reserved = geometry.reserve(word, start, granules * GRANULE_BYTES, 1)
        assert reserved is not None
        word = reserved
    assert unpack_position(word) == (1, 2, 4)
    assert geometry.reserve(word, start, 0, 1) is None


def test_a_head_ahead_of_its_tail_is_no_snapshot() -> None:
    """One read may fetch a tail and then a later head: nothing is computed from the two."""
    geometry = Geometry(2, 8 * GRANULE_BYTES, 1)
    with pytest.raises(StaleSnapshot):
        geometry.reserve(pack_position(1, 1, 1), pack_position(0, 2, 2), 1, 1)


@given(st.binary(min_size=48, max_size=48), st.integers(0, 511))
def test_a_slot_with_a_flipped_bit_is_not_read(noise: bytes, bit: int) -> None:
    """Any bit of commit word, fields or hash that is wrong makes the whole slot unreadable."""
    fields = SLOT.unpack(noise + bytes(16))[:8]
    image = bytearray(encode_slot(*fields))
    slot = decode_slot(bytes(image))
    assert slot is not None
    assert slot[:8] == fields
    image[bit // 8] ^= 1 << bit % 8
    in_hash = bit // 8 < 56
    assert (decode_slot(bytes(image)) is None) == in_hash


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_the_payload_hash_does_not_depend_on_the_pieces(buffers: list[bytes]) -> None:
    """Several buffers hash like the one that the consumer sees."""
    assert hash_payload(buffers) == hash_payload((b"".join(buffers),))


@given(geometries)
def test_a_geometry_survives_the_welcome(geometry: Geometry) -> None:
    """What is packed for the peer is what the peer computes with."""
    assert Geometry.from_bytes(geometry.to_bytes()) == geometry


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "24 bytes"),
        (b"\x09" + Geometry(2, 64, 1).to_bytes()[1:], "version 9"),
        (Geometry(2, 64, 1).to_bytes()[:4] + bytes(20), "slot_count"),
    ],
)
def test_a_foreign_geometry_is_refused_with_the_reason(data: bytes, what: str) -> None:
    """Another length, another version and impossible lengths are each named."""
    with pytest.raises(LayoutMismatch, match=what):
        Geometry.from_bytes(data)


@pytest.mark.parametrize(
    ("slots", "payload", "sessions", "what"),
    [
        (0, 64, 1, "slot_count"),
        ((1 << 18) + 1, 64, 1, "slot_count"),
        (1, 0, 1, "payload_bytes"),
        (1, 96, 1, "multiple of 64"),
        (1, (1 << 32) + 64, 1, "payload_bytes"),
        (1, 64, 0, "session_count"),
        (1, 64, 1 << 16, "session_count"),
    ],
)
def test_impossible_lengths_are_named(slots: int, payload: int, sessions: int, what: str) -> None:
    """A length out of bounds is refused by its name."""
    with pytest.raises(ValueError, match=what):
        Geometry(slots, payload, sessions)


apart = st.builds(
    Geometry,
    st.integers(1, 1 << 18),
    st.integers(2, 1 << 26).map(lambda granules: granules * GRANULE_BYTES),
    st.integers(1, 65535),
    st.integers(1, 1024).map(lambda lines: lines * GRANULE_BYTES),
)


@given(apart)
def test_a_payload_ring_apart_is_not_in_the_region(geometry: Geometry) -> None:
    """Heads stand behind the slots and end the region; payload is counted from the other memory's start."""
    last = geometry.slot_count - 1
    assert geometry.is_apart
    assert geometry.slot_offset(last) + 64 == geometry.head_slot_offset(0)
    assert geometry.head_slot_offset(last) + geometry.head_bytes == geometry.region_bytes
    assert geometry.payload_offset(0) == 0
    assert geometry.payload_offset(geometry.granule_count - 1) + GRANULE_BYTES == geometry.payload_bytes
    assert Geometry.from_bytes(geometry.to_bytes()) == geometry


@given(apart, st.data())
def test_seals_stand_behind_their_payload(geometry: Geometry, data: st.DataObject) -> None:
    """Payload and seal are one stretch, which ends with the seal's granule; no payload has no seal."""
    end = data.draw(st.integers(0, geometry.granule_modulus - 1))
    length = data.draw(st.integers(1, geometry.message_bytes_max))
    start, after = geometry.place(end, length)
    seal = geometry.seal_offset(start, length)
    assert geometry.payload_offset(start) + length <= seal
    assert seal + GRANULE_BYTES <= geometry.payload_bytes
    assert geometry.payload_offset(after - 1) == seal
    assert geometry.place(end, 0)[1] == geometry.place(end, 0)[0]


@pytest.mark.parametrize(
    ("payload_bytes", "head_bytes", "what"),
    [(4096, 63, "head_bytes"), (4096, 1 << 17, "head_bytes"), (64, 64, "seal"), (100, 64, "payload_bytes")],
)
def test_rings_apart_that_cannot_be(payload_bytes: int, head_bytes: int, what: str) -> None:
    """Heads of no whole granules, or a ring that holds nothing but a seal, are refused."""
    with pytest.raises(ValueError, match=what):
        Geometry(4, payload_bytes, 4, head_bytes)
