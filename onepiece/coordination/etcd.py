"""Several candidates that agree through etcd on which of them leads.

::

    PREFIX leader            control address of who leads, under the leader's lease
    PREFIX state/counters    epoch and next actor id
    PREFIX state/workflow/N  a registered workflow

* A candidate leads once it has created the leader's key, which goes with its lease. The lease is kept
  alive three times within its length; it counts from when a call was *sent*, so that a leader knows that it
  does not lead any more before anybody else can.
* Every write is a transaction that holds only while the leader's key is the one that this leader
  created (its create revision), and while nothing was written since this leader's last write (the
  modification revision of the counters, which every write sets). So neither a deposed leader nor a
  transaction that arrives late can change anything.
* A call that was not answered may have been carried out. Then the write is repeated; if it finds its own
  records, it was.
* While etcd does not answer, nothing is stored, and the manager waits; its leadership ends with its lease.

Others poll the leader's key rather than watch it: candidates are few, and a poll cannot be half dead.
"""

import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import ClassVar, Final

import anyio
import anyio.abc
from attrs import define, evolve, field, frozen

from onepiece.coordination._etcd_client import (
    EtcdClient,
    EtcdRefusedError,
    EtcdUnreachableError,
    KeyValue,
    Outcome,
    created_at,
    delete,
    modified_at,
    open_client,
    put,
)
from onepiece.coordination._state_records import COUNTERS, from_records, to_records
from onepiece.coordination.interface import Coordinator
from onepiece.core.manager import ManagerState
from onepiece.errors import ConfigError, LeadershipLost, StoreFull
from onepiece.log import get_logger

_POLL_SECONDS: Final = 0.5
_AGAIN_SECONDS: Final = 0.2
_CALL_SECONDS: Final = 2.0
_LEASE_USED: Final = 0.9
"""The part of its lease for which a leader leads: clocks do not run alike."""
_REVOKE_SECONDS: Final = 1.0
_START_SECONDS: Final = 6.0


@frozen
class EtcdOptions:
    """Which etcd, and how this candidate uses it.

    ``address`` is the candidate's control address, which others are told while it leads;
    ``lease_seconds`` (at least 2) is how long a leader that has died or is cut off still counts as one;
    ``start_seconds`` for how long an etcd that does not answer is tried before the candidate does not start.
    """

    members: tuple[str, ...]
    prefix: str
    address: str
    lease_seconds: int = 5
    start_seconds: float = _START_SECONDS
    tls: ssl.SSLContext | None = field(default=None, repr=False)


@asynccontextmanager
async def open_etcd(options: EtcdOptions) -> AsyncIterator[Coordinator]:
    """A candidate that may lead; leaving the context gives the leadership up, so that the next one leads.

    Raises:
        ConfigError: No member of etcd answers in ``start_seconds``, or it refuses; the message says what was
            tried.
    """
    call_seconds = min(_CALL_SECONDS, options.lease_seconds / 4)
    async with open_client(options.members, call_seconds, options.tls) as client:
        await _wait_reachable(options, client)
        async with anyio.create_task_group() as tasks:
            coordinator = _Etcd(options, client, tasks)
            try:
                yield coordinator
            finally:
                tasks.cancel_scope.cancel()
                with anyio.move_on_after(_REVOKE_SECONDS, shield=True):
                    await coordinator.close()


async def _wait_reachable(options: EtcdOptions, client: EtcdClient) -> None:
    """A mistake in the addresses is told at the start; an etcd that starts at the same time is waited for."""
    give_up_at = anyio.current_time() + options.start_seconds
    while True:
        try:
            await client.read(_leader_key(options))
        except (EtcdUnreachableError, EtcdRefusedError) as error:
            if isinstance(error, EtcdRefusedError) or anyio.current_time() >= give_up_at:
                raise ConfigError(
                    f"--coordination: {error}; start etcd (3.4 or later), or name the addresses at which its "
                    "members serve clients"
                ) from error
            get_logger().warning("etcd_unusable", error=str(error))
            await anyio.sleep(_POLL_SECONDS)
        else:
            return


def _leader_key(options: EtcdOptions) -> bytes:
    return f"{options.prefix}leader".encode()


@define(eq=False)
class _Term:
    """One leadership."""

    lease: int
    created: int
    """The create revision of the leader's key, which fences all writes."""
    ends_at: float
    """On the loop's clock; later with each renewal."""
    records: dict[bytes, bytes] = field(factory=dict)
    """As they are stored."""
    written: int = 0
    """The revision of the last write."""
    lost: anyio.Event = field(factory=anyio.Event)


@define(eq=False)
class _Etcd(Coordinator):
    has_rivals: ClassVar[bool] = True

    _options: EtcdOptions
    _client: EtcdClient
    _tasks: anyio.abc.TaskGroup
    _term: _Term | None = field(default=None, init=False)
    _leader: str | None = field(default=None, init=False)
    _is_closed: bool = field(default=False, init=False)
    _one_at_a_time: anyio.Lock = field(factory=anyio.Lock, init=False)
    _rng: random.Random = field(factory=random.SystemRandom, init=False)

    @property
    def leader(self) -> str | None:
        return self._leader

    async def lead(self) -> ManagerState:
        async with self._one_at_a_time:
            await self._resign()
            while True:
                if self._is_closed:
                    raise LeadershipLost("this coordinator is closed")
                state = await self._try_to_lead()
                if state is not None:
                    return state
                await anyio.sleep(_POLL_SECONDS * self._rng.uniform(0.5, 1.0))

    async def store(self, state: ManagerState) -> None:
        async with self._one_at_a_time:
            term = self._term
            if term is None or term.lost.is_set():
                raise LeadershipLost(f"the manager of epoch {state.epoch} does not lead any more")
            await self._write(term, to_records(state))

    async def wait_lost(self) -> None:
        if self._term is not None:
            await self._term.lost.wait()

    async def close(self) -> None:
        """Give the leadership up, so that another candidate need not wait for the lease to end."""
        self._is_closed = True
        await self._resign()

    # --- leading

    async def _resign(self) -> None:
        term, self._term = self._term, None
        if term is not None:
            term.lost.set()
            await self._revoke(term.lease)

    async def _revoke(self, lease: int) -> None:
        with suppress(EtcdUnreachableError, EtcdRefusedError):
            await self._client.revoke(lease)

    async def _try_to_lead(self) -> ManagerState | None:
        """The state, if this candidate leads from now on."""
        try:
            held = (await self._client.read(_leader_key(self._options))).get(_leader_key(self._options))
            self._see(held)
            return await self._campaign() if held is None else None
        except LeadershipLost as error:
            get_logger().warning("leadership_lost", error=error.message)
        except (EtcdUnreachableError, EtcdRefusedError, StoreFull) as error:
            get_logger().warning("etcd_unusable", error=str(error))
        await self._resign()
        return None

    async def _campaign(self) -> ManagerState | None:
        sent_at = anyio.current_time()
        lease, seconds = await self._client.grant(self._options.lease_seconds)
        key = _leader_key(self._options)
        mine = put(key, self._options.address.encode(), lease)
        outcome = await self._client.transact([created_at(key, 0)], [mine], [key])
        if not outcome.held:
            self._see(outcome.found.get(key))
            await self._revoke(lease)
            return None
        self._leader = None
        term = self._term = _Term(lease, outcome.revision, sent_at + _LEASE_USED * seconds)
        self._tasks.start_soon(self._keep, term, seconds)
        return await self._begin(term)

    async def _begin(self, term: _Term) -> ManagerState:
        """Take over what is stored, under an epoch of this leadership's own."""
        self._adopt(term, await self._client.read(self._state_prefix))
        place = f"etcd under {self._options.prefix!r}"
        before = from_records(term.records, place, "name another prefix in --coordination")
        state = evolve(before, epoch=before.epoch + 1)
        await self._write(term, to_records(state))
        return state

    def _see(self, held: KeyValue | None) -> None:
        """Note who leads; a key of our own is that of an earlier leadership, which nobody holds."""
        address = None if held is None else held.value.decode(errors="replace")
        self._leader = None if address == self._options.address else address

    async def _keep(self, term: _Term, seconds: int) -> None:
        """Keep the lease alive until the leadership is lost."""
        pause = seconds / 3
        while not term.lost.is_set():
            with anyio.move_on_after(min(pause, term.ends_at - anyio.current_time())):
                await term.lost.wait()
                return
            sent_at = anyio.current_time()
            left = None
            with (
                anyio.move_on_after(term.ends_at - sent_at),
                suppress(EtcdUnreachableError, EtcdRefusedError),
            ):
                left = await self._client.keep_alive(term.lease)
            if left:
                term.ends_at = sent_at + _LEASE_USED * left
            pause = seconds / 3 if left else _AGAIN_SECONDS
            if left == 0 or anyio.current_time() >= term.ends_at:
                why = "it is over" if left == 0 else "etcd did not renew it in time"
                get_logger().warning("leadership_lost", error=f"the leader's lease: {why}")
                term.lost.set()

    # --- what is stored

    @property
    def _state_prefix(self) -> bytes:
        return f"{self._options.prefix}state/".encode()

    def _adopt(self, term: _Term, found: dict[bytes, KeyValue]) -> None:
        prefix = self._state_prefix
        term.records = {
            key.removeprefix(prefix): each.value for key, each in found.items() if key.startswith(prefix)
        }
        counters = found.get(prefix + COUNTERS)
        term.written = 0 if counters is None else counters.modified

    async def _write(self, term: _Term, wanted: dict[bytes, bytes]) -> None:
        """Replace the records, as long as this term lasts; what etcd did not answer is repeated."""
        tried = ""
        while not term.lost.is_set():
            try:
                outcome = await self._try_to_write(term, wanted)
            except EtcdUnreachableError as error:
                tried = f"; {error}"
                await anyio.sleep(_AGAIN_SECONDS)
                continue
            except EtcdRefusedError as error:
                raise StoreFull(f"etcd did not store the manager's state: {error}") from error
            if outcome.held:
                term.records, term.written = wanted, outcome.revision
                return
            self._check_still_leads(term, outcome)
            self._adopt(term, dict(outcome.found))
            if term.records == wanted:
                return  # by an earlier try that was carried out, and whose answer was lost
        raise LeadershipLost(f"this manager's lease in etcd is over; nothing is known to be stored{tried}")

    async def _try_to_write(self, term: _Term, wanted: dict[bytes, bytes]) -> Outcome:
        prefix, key = self._state_prefix, _leader_key(self._options)
        changed = {name for name, value in wanted.items() if term.records.get(name) != value}
        changes = [put(prefix + name, wanted[name]) for name in sorted(changed | {COUNTERS})]
        changes += [delete(prefix + name) for name in sorted(term.records.keys() - wanted.keys())]
        conditions = [created_at(key, term.created), modified_at(prefix + COUNTERS, term.written)]
        return await self._client.transact(conditions, changes, [key, prefix])

    def _check_still_leads(self, term: _Term, outcome: Outcome) -> None:
        held = outcome.found.get(_leader_key(self._options))
        if held is not None and held.created == term.created:
            return
        term.lost.set()
        self._see(held)
        raise LeadershipLost(
            f"another manager leads ({self._leader or 'or none does'}); nothing was stored",
            leader=self._leader,
        )
