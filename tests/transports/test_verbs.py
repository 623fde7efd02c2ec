"""The verbs transport without devices: what is chosen, told, cut and staged; the kernel's tables; errors."""

import ipaddress
import subprocess
import sys
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from transports.address import Address
from transports.errors import AddressError, LayoutMismatch, ProtocolError
from transports.verbs_cards import CARD_BYTES, Card
from transports.verbs_devices import (
    Device,
    Gid,
    GidKind,
    NoPlaceError,
    Port,
    Wanted,
    as_gid,
    choose,
    devices_of,
)
from transports.verbs_link import PIECE_BYTES
from transports.verbs_staging import Staging, pieces

HERE = Address.parse("verbs://127.0.0.1:0")


def gid(index: int, address: str, kind: str = "RoCE v2") -> Gid:
    """An entry of a table."""
    return Gid(index, as_gid(address), kind)


ROCE_GIDS = (
    gid(0, "fe80::1", "IB/RoCE v1"),
    gid(1, "fe80::1"),
    gid(2, "10.0.0.1", "IB/RoCE v1"),
    gid(3, "10.0.0.1"),
    gid(4, "fd00::1"),
)
ETHERNET = Port(1, "Ethernet", "ACTIVE", "100 Gb/sec", ROCE_GIDS)
STORAGE = Port(1, "Ethernet", "ACTIVE", "25 Gb/sec", (gid(0, "192.168.7.1"),))
UNPLUGGED = Port(2, "Ethernet", "DOWN", "40 Gb/sec", (gid(0, "10.9.9.9"),))
INFINIBAND = Port(1, "InfiniBand", "ACTIVE", "200 Gb/sec", (gid(0, "fe80::2", "IB/RoCE v1"),), lid=9)
DEVICES = (Device("mlx5_0", (ETHERNET, UNPLUGGED)), Device("mlx5_1", (STORAGE,)))


def wanted(query: str, settings: str = "") -> Wanted:
    """What an address with this query asks for."""
    return Wanted.of(Address.parse(f"verbs://h:1?{query}"), settings)


def test_the_best_kind_of_gid_is_chosen() -> None:
    """By itself: IPv4 before IPv6 before link-local, never RoCE v1; InfiniBand before all."""
    place = choose(DEVICES, Wanted())
    assert (place.device, place.gid.index, place.kind) == ("mlx5_0", 3, GidKind.IPV4)
    without = evolve(ETHERNET, gids=ROCE_GIDS[:2] + ROCE_GIDS[4:])
    assert choose([Device("d", (without,))], Wanted()).kind is GidKind.IPV6
    assert choose([Device("d", (evolve(ETHERNET, gids=ROCE_GIDS[:2]),))], Wanted()).gid.index == 1
    assert choose([*DEVICES, Device("ib", (INFINIBAND,))], Wanted()).device == "ib"


def test_the_way_to_the_peer_is_chosen() -> None:
    """The gid made from this side's own address on the way to the peer goes first, on whichever device."""
    assert choose(DEVICES, Wanted(), near="192.168.7.1").device == "mlx5_1"
    assert choose(DEVICES, Wanted(), near="fd00::1").gid.index == 4
    assert choose(DEVICES, Wanted(), near="fe80::1%eth0").gid.index == 1
    assert choose(DEVICES, Wanted(), near="127.0.0.1").gid.index == 3


def test_only_the_peers_kind_reaches_it() -> None:
    """What the peer's gid is made from rules, before the own preference."""
    assert choose(DEVICES, Wanted(), like=GidKind.LINK_LOCAL).gid.index == 1
    assert choose(DEVICES, Wanted(), like=GidKind.ROCE_V1, near="10.0.0.1").gid.index == 2
    with pytest.raises(NoPlaceError, match="INFINIBAND"):
        choose(DEVICES, Wanted(), like=GidKind.INFINIBAND)


def test_what_an_address_asks_for_is_taken() -> None:
    """Device, port and gid, by number or address, also of RoCE v1, over settings of the same words."""
    assert choose(DEVICES, wanted("device=mlx5_1")).device == "mlx5_1"
    assert choose(DEVICES, wanted("device=mlx5_0&gid=0")).kind is GidKind.ROCE_V1
    assert choose(DEVICES, wanted("gid=fd00::1")).gid.index == 4
    assert choose(DEVICES, wanted("gid=192.168.7.1")).device == "mlx5_1"
    both = wanted("device=mlx5_1", "device=mlx5_0&spin=20")
    assert (both.device, both.spin_microseconds) == ("mlx5_1", 20)


@pytest.mark.parametrize(
    "query", ["device=mlx5_9", "port=2", "device=mlx5_1&port=3", "gid=10.9.9.9", "gid=77"]
)
def test_what_does_not_fit_is_named(query: str) -> None:
    """The error names what was asked for, and every port with its state and gids (fault 53)."""
    with pytest.raises(NoPlaceError) as caught:
        choose(DEVICES, wanted(query))
    for part in (query, "mlx5_0 [port 1 Ethernet ACTIVE", "3: 10.0.0.1 (RoCE v2)", "port 2 Ethernet DOWN"):
        assert part in str(caught.value)
    with pytest.raises(NoPlaceError, match="no devices"):
        choose((), Wanted())


@pytest.mark.parametrize(
    "query",
    [
        "devise=a",
        "device=",
        "device",
        "port=x",
        "port=256",
        f"port={'1' * 5000}",
        "gid=moon",
        f"gid={'1' * 5000}",
        "spin=1001",
        "spin=-1",
        "require=rdma",
    ],
)
def test_options_that_mean_nothing_are_refused(query: str) -> None:
    """A misspelt option is not taken for none, wherever it stands."""
    with pytest.raises(AddressError, match=query.partition("=")[0]):
        wanted(query)
    with pytest.raises(AddressError, match="ONEPIECE_VERBS") as caught:
        Wanted.of(HERE, query)
    assert str(HERE) not in str(caught.value), "it is not the address that is wrong"


def test_the_kernels_tables_are_read(tmp_path: Path) -> None:
    """Devices, ports, states and gids come from sysfs; entries that are empty or unreadable are none."""
    port = tmp_path / "mlx5_0" / "ports" / "1"
    (port / "gid_attrs" / "types").mkdir(parents=True)
    (port / "gids").mkdir()
    for name, text in (
        ("link_layer", "Ethernet"),
        ("state", "4: ACTIVE"),
        ("rate", "100 Gb/sec"),
        ("lid", "0x1f"),
    ):
        (port / name).write_text(f"{text}\n")
    entries = {0: "fe80::1", 1: "::", 2: "::ffff:10.0.0.1", 10: "fd00::1", 200: "fd00::2"}
    for index in range(201):
        address = ipaddress.IPv6Address(entries.get(index, "::"))
        (port / "gids" / str(index)).write_text(f"{address.exploded}\n")
    for index in (0, 2):
        (port / "gid_attrs" / "types" / str(index)).write_text("RoCE v2\n")
    (device,) = devices_of(tmp_path)
    (read,) = device.ports
    assert (device.name, read.number, read.is_active, read.lid) == ("mlx5_0", 1, True, 31)
    assert read.gids == (gid(0, "fe80::1"), gid(2, "10.0.0.1"), gid(10, "fd00::1", "")), (
        "200 is too far behind"
    )
    assert devices_of(tmp_path / "nowhere") == ()


CARD = Card(
    *(as_gid("10.0.0.1"), GidKind.IPV4, 7, 5, 0xABCDEF, 0xFFFFFF, 16, (1 << 64) - 1, (1 << 32) - 1),
    *((1 << 32) - 2, (1 << 64) - 2, (1 << 64) - 3),
)


def test_cards_come_back_or_are_refused() -> None:
    """A card is read as it was written; another length, version or a value that no adapter has is refused."""
    data = CARD.to_bytes()
    assert len(data) == CARD_BYTES
    assert Card.parse(memoryview(data)) == CARD
    with pytest.raises(ProtocolError, match="bytes"):
        Card.parse(memoryview(data[:-1]))
    with pytest.raises(LayoutMismatch, match="same release"):
        Card.parse(memoryview(b"\xff" + data[1:]))
    for wrong in (evolve(CARD, mtu=6), evolve(CARD, reads_served=0), evolve(CARD, pair=1 << 24)):
        with pytest.raises(ProtocolError):
            Card.parse(memoryview(wrong.to_bytes()))
    with pytest.raises(ProtocolError, match="unknown kind"):
        Card.parse(memoryview(data[:1] + b"\x09" + data[2:]))
    assert CARD.subnet == evolve(CARD, gid=as_gid("10.0.0.2")).subnet


@given(st.lists(st.binary(max_size=2000), max_size=12), st.integers(1, 700))
def test_pieces_are_the_bytes(buffers: list[bytes], piece_bytes: int) -> None:
    """Pieces, one behind the other, are the buffers; none is empty or too long, all but the last are full."""
    cut = [(length, b"".join(parts)) for length, parts in pieces(buffers, piece_bytes)]
    assert b"".join(part for _, part in cut) == b"".join(buffers)
    assert all(length == len(part) for length, part in cut)
    assert all(length == piece_bytes for length, _ in cut[:-1])
    assert all(0 < length <= piece_bytes for length, _ in cut)
    assert PIECE_BYTES % 64 == 0


@given(st.lists(st.tuples(st.integers(0, 1000), st.booleans()), max_size=200))
def test_staged_places_never_overlap(steps: list[tuple[int, bool]]) -> None:
    """Places that are taken lie within the ring and apart; what is given back is used again, without end."""
    size = 1 << 10
    staging = Staging(size)
    held: list[tuple[int, int, int]] = []
    for length, gives_back in steps:
        if gives_back and held:
            staging.give_back(held.pop(0)[2])
        found = staging.take(length)
        if found is None:
            assert held, "an empty ring has room for whatever is not longer than itself"
            continue
        start, end = found
        assert 0 <= start <= start + length <= size
        assert all(start + length <= begin or begin + long <= start for begin, long, _ in held)
        held.append((start, length, end))


def test_pyverbs_that_is_not_there_is_named() -> None:
    """Asking for verbs without pyverbs says where it comes from; tcp goes on, and logging is left alone."""
    script = (
        "import logging, sys\n"
        "sys.modules['pyverbs'] = None\n"
        "from transports import UnknownScheme, transport_for\n"
        "transport_for('tcp')\n"
        "try: transport_for('verbs')\n"
        "except UnknownScheme as error: print(error)\n"
        "print(logging.getLogger().handlers)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert "python3-pyverbs" in said[0]
    assert "onepiece doctor" in said[0]
    assert said[1] == "[]"
