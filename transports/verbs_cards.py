"""What the two ends of a verbs session tell each other before they connect (pure).

::

     0  u8    version
     1  u8    kind of the gid
     2  u8    largest path MTU, by verbs' number
     3  u8    reads and atomics of the peer that are served at once
     4  u16   lid (InfiniBand)
     6  u16   reserved
     8  u32   queue pair
    12  u32   number of the first packet
    16  16 B  gid
    32  u64   address of the memory, in its process; 0 for none
    40  u32   key to the memory
    44  u32   key to the device's memory beside it
    48  u64   where that begins, as its key counts
    56  u64   how much it is; 0 for none

A card is sent only to peers that have proven the cluster secret: whoever has an owner's card and its
session's queue pair may write to the whole region.
"""

import ipaddress
import struct
from typing import Final

from attrs import frozen

from transports.errors import LayoutMismatch, ProtocolError
from transports.verbs_devices import GidKind

VERSION: Final = 3
"""2: keys of exports say where they lie. 3: a device's memory beside the region."""
_CARD: Final = struct.Struct("<BBBBHHII16sQIIQQ")
CARD_BYTES: Final = _CARD.size
_NUMBER_MAX: Final = (1 << 24) - 1
_MTU_MAX: Final = 5


@frozen
class Card:
    """One end of a session."""

    gid: ipaddress.IPv6Address
    kind: GidKind
    lid: int
    mtu: int
    pair: int
    psn: int
    reads_served: int
    memory: int
    key: int
    device_key: int = 0
    device_memory: int = 0
    device_bytes: int = 0

    @property
    def subnet(self) -> int:
        """The part of the gid that all ports of an InfiniBand subnet share."""
        return int(self.gid) >> 64

    def to_bytes(self) -> bytes:
        """The wire form."""
        kind = int(self.kind)
        head = (VERSION, kind, self.mtu, self.reads_served, self.lid, 0, self.pair, self.psn)
        device = (self.device_key, self.device_memory, self.device_bytes)
        return _CARD.pack(*head, self.gid.packed, self.memory, self.key, *device)

    @classmethod
    def parse(cls, data: memoryview) -> "Card":
        """Read a card; raises ``ProtocolError`` or ``LayoutMismatch``."""
        if len(data) != CARD_BYTES:
            raise ProtocolError(f"a card of {len(data)} bytes, not {CARD_BYTES}")
        version, kind, mtu, reads, lid, _, pair, psn, gid, memory, key, *device = _CARD.unpack(data)
        if version != VERSION:
            raise LayoutMismatch(
                f"the peer's cards have version {version}, ours {VERSION}; run the same release"
            )
        if not 1 <= mtu <= _MTU_MAX or reads < 1 or max(pair, psn) > _NUMBER_MAX:
            raise ProtocolError(f"a card with MTU {mtu}, {reads} reads, queue pair {pair} and packet {psn}")
        try:
            gid_kind = GidKind(kind)
        except ValueError as error:
            raise ProtocolError(f"a card with a gid of an unknown kind: {kind}") from error
        return cls(ipaddress.IPv6Address(gid), gid_kind, lid, mtu, pair, psn, reads, memory, key, *device)
