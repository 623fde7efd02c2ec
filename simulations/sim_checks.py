"""What must hold in a simulated cluster, looked at while it runs and at its end.

All along: no value is stored under a UID but the one that its request must give; the tables of owners and
of what is retained agree with themselves. (The machines of ``onepiece.core`` and the clients check more.)

Once the faults are over: every client is told how its request ended, and every proxy tells it the same;
each error has a cause among the faults; nothing is left of a request but its end. Two requests of one
key have not both ended, unless two faults at a time have led to that.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from onepiece.codec import value_from_bytes
from onepiece.errors import NotReady, OwnedElsewhere, UnknownRequest
from onepiece.limits import STORES_RETURN_SECONDS
from onepiece.node.node import Node
from onepiece.store import LogEntry, PutOutcome, RecordKind, StoredRecord
from simulations.loop import VirtualLoop
from simulations.sim_clients import Clients, Ending, Request
from simulations.sim_disk import SimDisk
from simulations.sim_faults import Faults
from simulations.sim_machine import SimMachine, Unreachable
from simulations.sim_trace import Trace

SETTLE_SECONDS: Final = 180.0
"""How long after the last fault everything must have settled."""
LOOK_SECONDS: Final = 1.0
WRITTEN: Final = (PutOutcome.STORED, PutOutcome.REPLACED)


class Checks:
    """The checks of one run."""

    def __init__(self, loop: VirtualLoop, machines: Sequence[SimMachine], trace: Trace) -> None:
        self._loop = loop
        self._machines = list(machines)
        self._trace = trace
        self._values: dict[str, Ending] = {}
        """What was stored under each UID first, on whatever disk."""
        self._holders: dict[str, dict[SimDisk, None]] = {}
        """Disks that hold a result or an error, by UID."""
        self._records: dict[str, dict[SimDisk, None]] = {}
        """Disks that hold the record of a request that has not ended, by UID."""
        self._keyed: dict[str, dict[str, float]] = {}
        """When the first record was kept of each request of a key, by key and UID."""
        self._knew_at: dict[Node, float] = {}
        """When each node was first seen to know the set."""
        self._ended: dict[SimDisk, set[str]] = {}
        """Requests that a disk knows to have ended: what it is given of their records it does not keep."""
        for machine in machines:
            machine.disk.on_job = self._on_job

    # --- what the disks hold -------------------------------------------------------------------

    def _on_job(self, disk: SimDisk, job: tuple[Any, ...], found: Any) -> None:
        match job:
            case ("put", StoredRecord() as record, chunks, *_) if found in WRITTEN:
                self._stored(disk, record, b"".join(chunks))
            case ("purge" | "put_tombstone", *_):
                pass
            case ("put", LogEntry() as entry, *_) if found == entry.uid:
                if entry.key is not None:
                    self._keyed.setdefault(entry.key, {}).setdefault(entry.uid, self._loop.now)
                if entry.uid not in self._ended.get(disk, ()):
                    self._records.setdefault(entry.uid, {})[disk] = None
            case ("remove", str() as uid, *_):
                self._records.get(uid, {}).pop(disk, None)
                self._ended.setdefault(disk, set()).add(uid)
            case _:
                pass

    def _stored(self, disk: SimDisk, record: StoredRecord, value: bytes) -> None:
        if record.uid.startswith("retained-") or record.kind is RecordKind.INTENT:
            return
        self._holders.setdefault(record.uid, {})[disk] = None
        if record.kind is RecordKind.RESULT:
            ending = Ending(str(value_from_bytes(value)), is_result=True)
        else:
            ending = Ending(str(record.meta.get("error")), is_result=False)
        first = self._values.setdefault(record.uid, ending)
        if first.is_result and ending.is_result and first != ending:
            self._trace.fail(f"two results of {record.uid} are stored: {first}, and then {ending}")

    def may_wipe(self, disk: SimDisk) -> bool:
        """Whether all of this disk is on another one, too: no promise covers the loss of every copy."""
        held = (*self._holders.values(), *self._records.values())
        return all(len(disks) > 1 for disks in held if disk in disks)

    def wiped(self, disk: SimDisk) -> None:
        """This disk is empty now."""
        self._ended.pop(disk, None)
        for disks in (*self._holders.values(), *self._records.values()):
            disks.pop(disk, None)

    # --- all along -----------------------------------------------------------------------------

    async def watch(self) -> None:
        """Look at every node now and then, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for machine in self._machines:
                node = machine.node
                if node is None:
                    continue
                try:
                    node.env.retainer.check_invariants()
                    if node.proxy is not None:
                        node.proxy.owner.table.check_invariants()
                except AssertionError as error:
                    self._trace.fail(f"an invariant of {machine.name} is broken: {error!r}")

    # --- once the faults are over --------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until nothing is left of any request but its end."""
        give_up_at = self._loop.now + SETTLE_SECONDS
        while left := self._left():
            if self._loop.now >= give_up_at:
                for what in left:
                    self._trace.fail(f"{SETTLE_SECONDS:.0f} s after the last fault {what}")
                return
            await asyncio.sleep(LOOK_SECONDS)
        await self._flush()

    def _left(self) -> list[str]:
        """What has not settled, in words."""
        found: list[str] = []
        for machine in self._machines:
            node = machine.node
            if node is None:
                found.append(f"{machine.name} does not run")
                continue
            if self._is_new(node):  # for so long it may say that it does not know
                found.append(f"{machine.name} has just started")
            found += [f"{machine.name} {what}" for what in _left_at(node)]
            if node.proxy is not None:
                live = node.proxy.owner.table.live_uids()
                found += [f"{uid} has not ended: {self.where(uid)}" for uid in live]
        for uid, disks in self._records.items():
            if disks:
                found.append(f"the record of {uid} is still kept: {self.where(uid)}")
        return found

    def _is_new(self, node: Node) -> bool:
        """Whether it has known the set for less time than store nodes may take to join."""
        if not node.env.routes.table.nodes:
            return True
        return self._loop.now < self._knew_at.setdefault(node, self._loop.now) + STORES_RETURN_SECONDS

    def _name_of(self, disk: SimDisk) -> str:
        return next(machine.name for machine in self._machines if machine.disk is disk)

    def where(self, uid: str) -> str:
        """Where a request is, as each node has it, in words."""
        found: list[str] = []
        for machine in self._machines:
            node = machine.node
            if node is None:
                continue
            if node.proxy is not None and uid in node.proxy.owner.table.live_uids():
                status = node.proxy.owner.table.status(uid)
                stages = ", ".join(f"{stage} {state}" for stage, state in status.stages.items())
                found.append(f"{machine.name} owns it ({stages})")
            if node.host is not None and (active := node.host.active_of(uid)):
                found.append(f"{machine.name} has {', '.join(f'{at} {what}' for at, what in active.items())}")
            if sources := node.env.retainer.sources_of(uid):
                found.append(f"{machine.name} retains what came out of {', '.join(sources)}")
        names = [self._name_of(disk) for disk in self._records.get(uid, ())]
        return "; ".join([*found, f"its record is on {', '.join(names) or 'no disk'}"])

    async def _flush(self) -> None:
        """What nodes have to say to one another must get through."""
        for machine in self._machines:
            node, process = machine.node, machine.process
            assert node is not None, "it has settled"
            assert process is not None, "it has settled"
            flushing = process.start(node.env.outbox.flushed(), "flush")
            await asyncio.wait([flushing], timeout=SETTLE_SECONDS)
            if not flushing.done():
                self._trace.fail(f"what {machine.name} has sent is not taken after {SETTLE_SECONDS:.0f} s")
                flushing.cancel()

    async def judge(self, clients: Clients, faults: Faults) -> None:
        """Every proxy knows how each request ended, says the same as all others, and has a reason."""
        for request in clients.requests:
            if request.uid is None:
                continue
            for machine in self._machines:
                if machine.node is not None and machine.node.proxy is not None:
                    await self._ask(request, machine, clients)
            for ending in request.endings:
                why = _without_cause(request, ending, faults)
                if why is not None:
                    said = "; ".join(request.messages)
                    self._trace.fail(f"{request.uid} has ended in {ending} ({said}), though {why}")

        for key, kept_at in self._keyed.items():
            ended = {uid: at for uid, at in kept_at.items() if uid in self._values}
            if len(ended) > 1 and faults.at_work(min(ended.values()), max(ended.values())) < 2:
                told = ", ".join(f"{uid} of {at:.3f} ({self._values[uid]})" for uid, at in ended.items())
                self._trace.fail(f"{key} stands for {len(ended)} requests, with one fault at a time: {told}")

    async def _ask(self, request: Request, machine: SimMachine, clients: Clients) -> None:
        try:
            ending = await clients.ask(request, machine)
        except (NotReady, OwnedElsewhere, UnknownRequest, Unreachable) as error:
            self._trace.fail(f"{machine.name} does not know how {request.uid} ended: {error!r}")
            return
        if ending is None:
            self._trace.fail(f"{request.uid} has not ended, says {machine.name}")
        else:
            clients.note(request, ending, machine.name)


def _left_at(node: Node) -> list[str]:
    found = []
    retained = node.env.retainer.metrics()["outputs"]
    if retained:
        found.append(f"retains {retained} outputs: {', '.join(map(str, node.env.retainer.keys()))}")
    if node.env.owners:
        found.append(f"knows owners of requests that have ended: {', '.join(node.env.owners)}")
    if node.host is not None:
        found += [
            f"has work for {report.stage}: {report.queued} queued, {report.running} running"
            for report in node.host.reports()
            if report.queued or report.running
        ]
    return found


def _without_cause(request: Request, ending: Ending, faults: Faults) -> str | None:
    """Why this ending has no cause, in words; None if it has one."""
    wish = request.wish
    if ending.is_result:
        return None if wish.failure == "none" else "its stage was asked to fail"
    accepted_at = request.accepted_at or 0.0
    losses = faults.losses_since(accepted_at)
    match ending.what:
        case "RequestCancelled":
            return None if request.was_cancelled else "nobody has cancelled it"
        case "DeadlineExceeded":
            return None if wish.timeout_seconds < SETTLE_SECONDS else "its deadline is far away"
        case "StageFailed" if wish.failure != "none":
            return None
        case "StageFailed" | "NodeLost":
            return None if losses > 1 else f"only {losses} nodes were lost"
        case "StoreFull":
            return None if faults.losses.full else "no disk was full"
        case _:
            return "nothing that was done to the cluster leads to that"
