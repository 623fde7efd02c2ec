"""Queue pairs: reliable connections over which adapters carry out what is posted, and tell the event loop.

What it takes care of: work requests are freed by hand, since pyverbs 44 leaks them; the descriptor of a
completion channel is found, since pyverbs 44 does not tell it; nothing here ever waits for an event,
since that would hold the interpreter's lock.
"""

import asyncio
import enum
import os
import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from attrs import define

from transports._pyverbs import (
    Domain,
    Registered,
    RegisteredDevice,
    VerbsError,
    load,
    named,
    peers_may,
)
from transports.verbs_cards import Card
from transports.verbs_devices import Place

_INLINE_WANTED: Final = (220, 124, 60, 0)
"""Bytes that may be inside a work request: as many as the adapter takes, from a slot's to none."""
_HOPS: Final = 64
_TIMEOUT: Final = 16
"""An answer is late after 4.096 us * 2^16, 268 ms."""
_RETRIES: Final = 6
"""Then the pair fails, after some two seconds. Not 7: Soft-RoCE takes that for no bound."""
_RETRIES_FOR_EVER: Final = 7
_RECEIVER_NOT_READY: Final = 12
"""How long a sender pauses whose peer has no receive request left: 0.64 ms."""
_POLLED_AT_ONCE: Final = 64


class Verb(enum.Enum):
    """What a work request asks for."""

    WRITE = enum.auto()
    WRITE_AND_NOTIFY = enum.auto()
    READ = enum.auto()
    SWAP = enum.auto()
    ADD = enum.auto()

    __hash__ = object.__hash__  # looked up several times for each request; that of enumerations is slow


@define(eq=False)
class Work:
    """A work request.

    ``local`` is where the bytes come from or go to: ``length`` of them; 8 for atomics, which bring the word
    found.
    """

    id: int
    verb: Verb
    local: int
    length: int
    remote: int
    inline: bool = False
    """The bytes are taken when it is posted, from any memory."""
    signalled: bool = True
    compare_or_add: int = 0
    swap: int = 0
    local_key: int | None = None
    """To other local memory than that of the rest."""
    into_device: bool = False
    """``remote`` is in the device's memory beside the peer's region."""
    remote_key: int = 0
    """0: that of the peer's card."""


class Completion(NamedTuple):
    """What became of a work request."""

    id: int
    failure: str | None
    """None: it was carried out, and with it all that were posted before it."""


class Pair:
    """One end of a reliable connection.

    Args:
        domain: What the peer may reach.
        place: Where the packets leave.
        sends: Work requests that may be posted and not completed.
        receives: Notifications of the peer that may be waiting.
        for_peers: The peer may write to the domain's memory; it may always read what is registered for that.
        on_completions: Called on the event loop when there is something to ``poll``.
    """

    def __init__(
        self,
        domain: Domain,
        place: Place,
        *,
        sends: int,
        receives: int,
        for_peers: bool,
        on_completions: Callable[[], None],
    ) -> None:
        self.place = place
        self._adapter = domain.adapter
        self._for_peers = for_peers
        self._loop = asyncio.get_running_loop()
        self._on_completions = on_completions
        verbs = load()
        with named(f"{place}: no queue pair"):
            self._channel, self._descriptor = _new_channel(domain.adapter.context)
            os.set_blocking(self._descriptor, False)
            self._queue = verbs.cq.CQ(domain.adapter.context, sends + receives, None, self._channel, 0)
            self._pair, self.inline_bytes_max = self._new_pair(domain, sends, receives)
        # Where a work request's bytes are; each request copies it when it is made.
        self._place_of_bytes = verbs.wr.SGE(0, 0, 0)
        self._receive = verbs.wr.RecvWR(wr_id=0, num_sge=1, sg=[self._place_of_bytes])
        self._peer: Card | None = None
        self._closed = False
        self._queue.req_notify()
        self._loop.add_reader(self._descriptor, self._readable)

    def _new_pair(self, domain: Domain, sends: int, receives: int) -> tuple[Any, int]:
        verbs = load()
        for inline in _INLINE_WANTED:
            capacity = verbs.qp.QPCap(
                max_send_wr=sends,
                max_recv_wr=receives,
                max_send_sge=1,
                max_recv_sge=1,
                max_inline_data=inline,
            )
            asked = verbs.qp.QPInitAttr(
                qp_type=verbs.enums.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=capacity, sq_sig_all=0
            )
            try:
                return verbs.qp.QP(domain.handle, asked), inline
            except verbs.error:
                if not inline:
                    raise
        raise AssertionError("unreachable")

    def card(
        self, psn: int, *, memory: Registered | None = None, device: RegisteredDevice | None = None
    ) -> Card:
        """What the peer needs to know of this end; ``psn`` numbers the first packet."""
        return Card(
            gid=self.place.gid.address,
            kind=self.place.kind,
            lid=self.place.port.lid,
            mtu=self._adapter.mtu(self.place.port.number),
            pair=self._pair.qp_num,
            psn=psn,
            reads_served=self._adapter.limits.reads_served,
            memory=0 if memory is None else memory.address,
            key=0 if memory is None else memory.remote_key,
            device_key=0 if device is None else device.remote_key,
            device_memory=0 if device is None else device.address,
            device_bytes=0 if device is None else device.size_bytes,
        )

    def connect(self, own: Card, peer: Card) -> None:
        """Connect to the peer's end; both sides do. Raises ``VerbsError``."""
        verbs = load()
        place = self.place
        enums, port = verbs.enums, place.port.number
        attributes = verbs.qp.QPAttr(port_num=port)
        attributes.pkey_index = 0
        attributes.qp_access_flags = peers_may(enums) if self._for_peers else enums.IBV_ACCESS_REMOTE_READ
        attributes.path_mtu = min(own.mtu, peer.mtu)
        attributes.dest_qp_num = peer.pair
        attributes.rq_psn, attributes.sq_psn = peer.psn, own.psn
        attributes.max_dest_rd_atomic = self._adapter.limits.reads_served
        attributes.max_rd_atomic = min(self._adapter.limits.reads_asked, peer.reads_served)
        attributes.min_rnr_timer, attributes.rnr_retry = _RECEIVER_NOT_READY, _RETRIES_FOR_EVER
        attributes.timeout, attributes.retry_cnt = _TIMEOUT, _RETRIES
        # Between Ethernet ports always; between InfiniBand's where a router is on the way.
        is_global = place.port.is_ethernet or peer.subnet != own.subnet
        route = verbs.addr.GlobalRoute(
            dgid=verbs.addr.GID(peer.gid.exploded), sgid_index=place.gid.index, hop_limit=_HOPS
        )
        attributes.ah_attr = verbs.addr.AHAttr(
            port_num=port, is_global=int(is_global), gr=route, dlid=0 if place.port.is_ethernet else peer.lid
        )
        with named(f"{place} cannot be connected to the peer's gid {peer.gid}"):
            self._pair.to_init(attributes)
            self._pair.to_rtr(attributes)
            self._pair.to_rts(attributes)
        self._peer = peer

    # Work.

    def post(self, works: Sequence[Work], key: int) -> None:
        """Post work requests as one list, to be carried out in this order.

        Args:
            works: Not more than the send queue has room for.
            key: To the local memory that they use.

        Raises:
            VerbsError: Some of them may be under way; the pair is of no use any more.
        """
        verbs, peer = load(), self._peer
        assert peer is not None
        requests: list[Any] = []
        try:
            for work in works:
                requests.append(self._request(work, key, peer))  # noqa: PERF401  # what is made must be closed
            for request, following in pairwise(requests):
                request.next_wr = following
            self._pair.post_send(requests[0])
        except verbs.error as error:
            raise VerbsError(f"{self.place}: work cannot be posted: {error}") from error
        finally:
            for request in requests:
                request.close()

    def _request(self, work: Work, key: int, peer: Card) -> Any:
        verbs = load()
        enums, place = verbs.enums, self._place_of_bytes
        key = key if work.local_key is None else work.local_key
        place.addr, place.length, place.lkey = work.local, work.length, 0 if work.inline else key
        flags = (enums.IBV_SEND_SIGNALED if work.signalled else 0) | (
            enums.IBV_SEND_INLINE if work.inline else 0
        )
        request = verbs.wr.SendWR(
            wr_id=work.id, opcode=_opcode(work.verb), num_sge=1, sg=[place], send_flags=flags
        )
        if work.verb in _ATOMIC:
            request.set_wr_atomic(peer.key, work.remote, work.compare_or_add, work.swap)
        else:
            key = peer.device_key if work.into_device else peer.key
            request.set_wr_rdma(work.remote_key or key, work.remote)
        return request

    def expect(self, count: int) -> None:
        """Take ``count`` more notifications."""
        try:
            for _ in range(count):
                self._pair.post_recv(self._receive)
        except load().error as error:
            raise VerbsError(f"{self.place}: no receive request can be posted: {error}") from error

    def poll(self) -> list[Completion]:
        """What has been completed since the last call; some of it, if it is much."""
        verbs = load()
        try:
            _, completed = self._queue.poll(_POLLED_AT_ONCE)
        except verbs.error as error:
            raise VerbsError(f"{self.place}: the completion queue cannot be read: {error}") from error
        success = verbs.enums.IBV_WC_SUCCESS
        return [
            Completion(
                entry.wr_id, None if entry.status == success else verbs.cq.cqe_status_to_str(entry.status)
            )
            for entry in completed
        ]

    def _readable(self) -> None:
        verbs = load()
        try:
            self._channel.get_cq_event(self._queue)
        except verbs.error:
            return  # there was none, after all
        self._queue.ack_events(1)
        # Armed before it is read: what is completed from now on wakes us again.
        self._queue.req_notify()
        self._on_completions()

    # How it ends.

    @property
    def closed(self) -> bool:
        """Nothing goes through it any more."""
        return self._closed

    def close(self) -> None:
        """Refuse the peer's packets and give all back; nothing of the peer's lands any more. Idempotent.

        Raises:
            VerbsError: The adapter obeys neither; what the peer has sent may still land.
        """
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        verbs = load()
        reset = verbs.qp.QPAttr(qp_state=verbs.enums.IBV_QPS_RESET)
        refused = True
        try:
            self._pair.modify(reset, verbs.enums.IBV_QP_STATE)
        except verbs.error:
            refused = False  # a device that is gone; then there is no pair to be destroyed either
        try:
            self._pair.close()
        except verbs.error as error:
            if not refused:
                raise VerbsError(
                    f"{self.place}: the queue pair can be neither reset nor destroyed: {error}"
                ) from error
        self._receive.close()
        self._place_of_bytes.close()
        with named(f"{self.place}: a completion queue cannot be given back"):
            self._queue.close()
            self._channel.close()


_ATOMIC: Final = frozenset({Verb.SWAP, Verb.ADD})


@cache
def _opcode(verb: Verb) -> Any:
    enums = load().enums
    return {
        Verb.WRITE: enums.IBV_WR_RDMA_WRITE,
        Verb.WRITE_AND_NOTIFY: enums.IBV_WR_RDMA_WRITE_WITH_IMM,
        Verb.READ: enums.IBV_WR_RDMA_READ,
        Verb.SWAP: enums.IBV_WR_ATOMIC_CMP_AND_SWP,
        Verb.ADD: enums.IBV_WR_ATOMIC_FETCH_AND_ADD,
    }[verb]


_OPENING: Final = threading.Lock()
_EVENT_FILE: Final = "infinibandevent"


def _new_channel(context: Any) -> tuple[Any, int]:
    """A completion channel and its descriptor."""
    with _OPENING:  # nobody else's channel may appear meanwhile
        before = _event_files()
        channel = load().cq.CompChannel(context)
        found = _event_files() - before
    if len(found) != 1:
        raise VerbsError(
            f"the descriptor of a completion channel is one of {sorted(found)}; which is not known"
        )
    return channel, found.pop()


def _event_files() -> set[int]:
    """The descriptors of this process by which verbs tell events."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            if _EVENT_FILE in str(path.readlink()):
                found.add(int(path.name))
        except OSError:
            continue  # the listing's own, closed by now
    return found
