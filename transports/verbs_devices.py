"""Which RDMA devices the machine has, and which port and gid a session uses (the choice is pure).

Read from the kernel's own tables (``/sys/class/infiniband``), so that it can be told without a verbs
library. What is chosen follows from contents, never from numbers: the gid that was made from the address
over which the two sides talk anyway; else the best kind of gid there is.
"""

import enum
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from attrs import frozen

from transports.address import Address, parse_options
from transports.errors import AddressError

SYSFS: Final = Path("/sys/class/infiniband")
GIDS_MAX: Final = 256
"""Entries of a gid table that are looked at."""
SPIN_MICROSECONDS_MAX: Final = 1000
SETTINGS_VARIABLE: Final = "ONEPIECE_VERBS"
"""The environment's words for all sessions of a process; an address's own go before them."""

_DIGITS_MAX: Final = 9
_EMPTY_MAX: Final = 8
"""So many entries without a gid are taken for the table's end."""
_ETHERNET: Final = "Ethernet"
_ACTIVE: Final = "ACTIVE"


class GidKind(enum.IntEnum):
    """What a gid is made from; the larger the better for a session between hosts."""

    ROCE_V1 = 0
    """Ethernet frames of a type of their own, which no router passes on; only on demand."""
    LINK_LOCAL = 1
    IPV6 = 2
    IPV4 = 3
    INFINIBAND = 4


@frozen
class Gid:
    """An entry of a port's table: under which address its packets travel."""

    index: int
    address: ipaddress.IPv6Address
    type: str
    """As the kernel names it: ``RoCE v2``, ``IB/RoCE v1``."""

    def __str__(self) -> str:
        return f"{self.index}: {self.address.ipv4_mapped or self.address} ({self.type})"


@frozen
class Port:
    """A port of a device."""

    number: int
    link_layer: str
    state: str
    rate: str
    gids: tuple[Gid, ...]
    lid: int = 0

    @property
    def is_active(self) -> bool:
        """It can carry packets."""
        return self.state == _ACTIVE

    @property
    def is_ethernet(self) -> bool:
        """It speaks RoCE."""
        return self.link_layer == _ETHERNET

    def kind(self, gid: Gid) -> GidKind:
        """What one of this port's gids is made from."""
        if not self.is_ethernet:
            return GidKind.INFINIBAND
        if "v2" not in gid.type:
            return GidKind.ROCE_V1
        if gid.address.ipv4_mapped is not None:
            return GidKind.IPV4
        return GidKind.LINK_LOCAL if gid.address.is_link_local else GidKind.IPV6

    def __str__(self) -> str:
        gids = "; ".join(map(str, self.gids)) or "none"
        return f"port {self.number} {self.link_layer} {self.state} {self.rate}, gids {gids}"


@frozen
class Device:
    """An RDMA device by its name."""

    name: str
    ports: tuple[Port, ...]

    def __str__(self) -> str:
        return f"{self.name} [{'] ['.join(map(str, self.ports)) or 'no ports'}]"


@frozen
class Place:
    """Where a session's packets leave: a device, one of its ports, one of the port's gids."""

    device: str
    port: Port
    gid: Gid

    @property
    def kind(self) -> GidKind:
        """What the gid is made from."""
        return self.port.kind(self.gid)

    def __str__(self) -> str:
        return f"{self.device} port {self.port.number}, gid {self.gid}"


class NoPlaceError(Exception):
    """No device, port or gid is as wanted; the message shows what there is."""


@frozen
class Wanted:
    """What an address asks for: ``verbs://host:port?device=mlx5_0&port=1&gid=3&spin=20``."""

    device: str = ""
    port: int = 0
    gid: str = ""
    """An index, or an address (``10.0.0.1``, ``fe80::1``)."""
    spin_microseconds: int = 0
    """How long a question looks for its answer by itself before it lets the event loop wait for it."""

    NAMES = ("device", "port", "gid", "spin")

    @classmethod
    def of(cls, address: Address, settings: str = "") -> "Wanted":
        """Read an address's options, and settings of the same form; raises ``AddressError``."""
        given = parse_options(settings, SETTINGS_VARIABLE) | dict(address.options)

        def place(name: str) -> str:
            return str(address) if name in address.options else f"{SETTINGS_VARIABLE}={settings}"

        if unknown := sorted(given.keys() - set(cls.NAMES)):
            known = ", ".join(cls.NAMES)
            raise AddressError(f"{place(unknown[0])}: verbs has no option {unknown[0]}; known are {known}")
        gid = given.get("gid", "")
        if gid and (not gid.isdecimal() or len(gid) > _DIGITS_MAX):
            try:
                ipaddress.ip_address(gid)
            except ValueError as error:
                raise AddressError(f"{place('gid')}: gid={gid} is neither an index nor an address") from error
        return cls(
            device=given.get("device", ""),
            port=_number(place("port"), given, "port", 255),
            gid=gid,
            spin_microseconds=_number(place("spin"), given, "spin", SPIN_MICROSECONDS_MAX),
        )

    def __str__(self) -> str:
        said = {"device": self.device, "port": self.port, "gid": self.gid}
        return "&".join(f"{name}={value}" for name, value in said.items() if value) or "any active port"


def _number(place: str, given: Mapping[str, str], name: str, largest: int) -> int:
    text = given.get(name, "0")
    if not text.isdecimal() or len(text) > _DIGITS_MAX or int(text) > largest:
        raise AddressError(f"{place}: {name}={text} is no number up to {largest}")
    return int(text)


def choose(
    devices: Sequence[Device],
    wanted: Wanted,
    *,
    near: str = "",
    like: GidKind | None = None,
) -> Place:
    """Choose device, port and gid.

    Args:
        devices: Those of this machine.
        wanted: What the address asks for; what it names must be there.
        near: This side's own IP address on the way to the peer; a gid made from it goes first.
        like: The kind of the peer's gid; only this kind reaches it.

    Raises:
        NoPlaceError: Nothing fits.
    """
    places = [
        Place(device.name, port, gid)
        for device in devices
        for port in device.ports
        for gid in port.gids
        if _fits(device, port, gid, wanted, like)
    ]
    if not places:
        kind = "" if like is None else f" with a gid of the peer's kind ({like.name})"
        raise NoPlaceError(
            f"no RDMA port fits {wanted}{kind}; there are: {'; '.join(map(str, devices)) or 'no devices'}."
            " `onepiece doctor` says what is missing"
        )
    own = as_gid(near) if near else None
    # The first of equals: devices and gids come in the kernel's order.
    return max(places, key=lambda place: (place.gid.address == own, place.kind))


def _fits(device: Device, port: Port, gid: Gid, wanted: Wanted, like: GidKind | None) -> bool:
    kind = port.kind(gid)
    if like is not None and kind is not like:
        return False
    if kind is GidKind.ROCE_V1 and not wanted.gid and like is None:
        return False
    return (
        port.is_active
        and wanted.device in {"", device.name}
        and wanted.port in {0, port.number}
        and (not wanted.gid or _is_named(gid, wanted.gid))
    )


def _is_named(gid: Gid, name: str) -> bool:
    return gid.index == int(name) if name.isdecimal() else gid.address == as_gid(name)


def as_gid(address: str) -> ipaddress.IPv6Address:
    """The gid that is made from an IP address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return ipaddress.IPv6Address(f"::ffff:{parsed}") if parsed.version == 4 else parsed


# What the kernel says.


def devices_of(folder: Path = SYSFS) -> tuple[Device, ...]:
    """The devices that the kernel knows; none where it has no RDMA."""
    return tuple(Device(path.name, _ports(path / "ports")) for path in _entries(folder))


def _entries(folder: Path) -> Iterable[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda path: (len(path.name), path.name))
    except OSError:
        return ()


def _ports(folder: Path) -> tuple[Port, ...]:
    return tuple(
        Port(
            number=int(path.name),
            link_layer=_text(path / "link_layer"),
            state=_text(path / "state").partition(": ")[2],
            rate=_text(path / "rate"),
            gids=_gids(path),
            lid=_lid(path),
        )
        for path in _entries(folder)
        if path.name.isdecimal()
    )


def _lid(port: Path) -> int:
    try:
        return int(_text(port / "lid") or "0", 16)
    except ValueError:
        return 0


def _gids(port: Path) -> tuple[Gid, ...]:
    gids: list[Gid] = []
    empty = 0
    for path in [entry for entry in _entries(port / "gids") if entry.name.isdecimal()][:GIDS_MAX]:
        address = _gid(path)
        empty = empty + 1 if address.is_unspecified else 0
        if empty > _EMPTY_MAX:
            break
        if empty:
            continue
        gids.append(Gid(int(path.name), address, _text(port / "gid_attrs" / "types" / path.name)))
    return tuple(gids)


def _gid(path: Path) -> ipaddress.IPv6Address:
    try:
        return ipaddress.IPv6Address(_text(path) or "::")
    except ValueError:
        return ipaddress.IPv6Address("::")


def _text(path: Path) -> str:
    """A file's words; none if it cannot be read, as entries that are not in use cannot."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
