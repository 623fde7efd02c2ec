"""The words of replication: versions and their order, who holds them, events and effects.

What stands under a UID on one node is a *version*: a value, an error, an intent or a tombstone, and when it
was first stored. Of two versions one beats the other, the same one on every node: a tombstone beats all
else, an error beats a value, a value an intent. An *intent* is an error that a request is to end in, if
nothing else stands where its owner asks for it to be stored; the owner then has an error stored in its
place, or leaves it behind. So an error is there only where it was decided that it is the end, and a result
that a node out of reach has stored, or an intent, does not change that once the node is back.

Of two of a kind the earlier one stands, since the first writer wins. (Were it the later one, a result that
a client has begun to read could be exchanged under its hands by a stage that ran twice.) Two values of the
same kind and moment are taken for the same.

``replication`` has the machine, and says what all of this is for.
"""

from collections.abc import Iterable
from typing import Final, TypeAlias

from attrs import frozen

from onepiece.core.routing import ranked

TOMBSTONE: Final = "tombstone"
ERROR: Final = "error"
INTENT: Final = "intent"
_RANKS: Final = {TOMBSTONE: 0, ERROR: 1, INTENT: 3}
_VALUE_RANK: Final = 2


def copy_holders(uid: str, stores: Iterable[str], copies: int) -> tuple[str, ...]:
    """The store nodes that hold copies of what belongs to ``uid``, the first choice first."""
    return tuple(ranked(uid, stores)[:copies])


@frozen
class Version:
    """What stands under a UID on one node."""

    uid: str
    kind: str
    """``TOMBSTONE``, ``ERROR``, ``INTENT``, or what else is stored."""
    stored_at: float
    """When it was first stored, by that node's clock; copies keep it."""

    def beats(self, other: "Version | None") -> bool:
        """Whether it replaces ``other``; see the module's text. None is beaten by everything."""
        return other is None or self.order < other.order

    @property
    def order(self) -> tuple[int, float, str]:
        """What is less is better."""
        if self.kind == TOMBSTONE:
            return 0, 0.0, ""
        return _RANKS.get(self.kind, _VALUE_RANK), self.stored_at, self.kind


@frozen
class StoreNode:
    """A living store node as the route table names it."""

    node_id: str
    life: str
    takes_copies: bool = True
    """False while it drains: others hold in its place already."""


@frozen
class ReplicationConfig:
    """How many copies there are, and how fast they are made."""

    copies: int = 2
    in_flight_per_peer: int = 4
    pending_max: int = 1024
    """Copies under way or waiting, to all peers together."""
    page_records_max: int = 128
    page_seconds: float = 0.05
    """The shortest time between two pages of this node."""
    settle_seconds: float = 2.0
    """How long to wait after a node left: most come back, and then nothing has to move."""
    retry_seconds: float = 1.0
    """Before the second attempt; doubled for each further one."""
    retry_seconds_max: float = 30.0
    attempts_max: int = 3
    round_seconds: float = 300.0
    """The longest time between two rounds with the same peer."""

    def __attrs_post_init__(self) -> None:
        assert self.copies >= 1
        assert self.in_flight_per_peer >= 1
        assert 1 <= self.page_records_max <= self.pending_max
        assert self.page_seconds > 0
        assert self.settle_seconds >= 0
        assert 0 < self.retry_seconds <= self.retry_seconds_max < self.round_seconds
        assert self.attempts_max >= 1

    def pause_seconds(self, failures: int) -> float:
        """How long to wait after so many failures in a row."""
        return min(self.retry_seconds * 2.0 ** (failures - 1), self.retry_seconds_max)


# --- events ------------------------------------------------------------------------------------


@frozen
class StoresChanged:
    """The store nodes of a newer route table, this node among them."""

    stores: tuple[StoreNode, ...]


@frozen
class Stored:
    """A value or an error was stored here first, and is durable."""

    uid: str


@frozen
class Purged:
    """A tombstone was written here."""

    uid: str


@frozen
class CopyTaken:
    """The peer has what was sent, or better, and it is durable."""

    number: int


@frozen
class CopyFailed:
    """The peer did not take it, or did not say so in time."""

    number: int


@frozen
class CopyRefused:
    """A peer sent what this node has better."""

    uid: str
    peer: str


@frozen
class CopyReplaced:
    """A peer sent what is better than what stood here, and it now stands here."""

    uid: str
    peer: str
    is_tombstone: bool


@frozen
class SummaryReceived:
    """A peer offers what this node should hold; ``mine`` is what stands here under those UIDs."""

    peer: str
    page: tuple[Version, ...]
    mine: tuple[Version, ...]


@frozen
class SummaryAnswered:
    """The peer wants these of the page; ``up_to`` is where the page ended, None if it was the last."""

    number: int
    wanted: tuple[str, ...]
    up_to: str | None


@frozen
class SummaryFailed:
    """The page could not be made or sent, or was not answered in time."""

    number: int


@frozen
class Tick:
    """Time has passed."""


ReplicationEvent: TypeAlias = (
    StoresChanged
    | Stored
    | Purged
    | CopyTaken
    | CopyFailed
    | CopyRefused
    | CopyReplaced
    | SummaryReceived
    | SummaryAnswered
    | SummaryFailed
    | Tick
)


# --- effects -----------------------------------------------------------------------------------


@frozen
class SendCopy:
    """Send the peer what stands under the UID now; ends in ``CopyTaken`` or ``CopyFailed``."""

    number: int
    uid: str
    peer: str


@frozen
class SendSummary:
    """Offer the peer what it should hold (``should_hold``) of the next records behind a UID.

    Ends in ``SummaryAnswered`` or ``SummaryFailed``.
    """

    number: int
    peer: str
    after_uid: str


@frozen
class Pull:
    """Answer the peer's page: these of it are wanted, perhaps none."""

    peer: str
    uids: tuple[str, ...]


ReplicationEffect: TypeAlias = SendCopy | SendSummary | Pull
