"""Keeps a node's outputs until the stages that take them are done: the driver of ``RetentionTable``.

The table decides what is kept where; this carries it out: writes what is spilled to a store of the
node's own, reads it back when it must be sent again, and lets stages wait for room.

What lies on a device when it is computed is copied to the host's memory, one output at a time, while it is
on its way already: from then on it is retained as any other, and the device has its memory back once it has
arrived.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from attrs import evolve, frozen

from onepiece.codec import PackedAnywhere
from onepiece.core.retention import OutputKey, Place, RetentionEffect, RetentionTable, Spill
from onepiece.errors import OnePieceError
from onepiece.log import get_logger
from onepiece.runtime.device_messages import in_host, lies_in_host
from onepiece.runtime.result_targets import Target
from onepiece.runtime.signal import Signal
from onepiece.runtime.under_way import UnderWay
from onepiece.store import ResultStore
from transports.operations import Content

_SPILLED_TYPE: Final = "application/vnd.onepiece.retained"
_SPILLED_SECONDS: Final = 30 * 24 * 3600.0
"""The spill store forgets by release, not by time; nothing lives longer than a month."""


@frozen
class Output:
    """A message that is retained, and where it goes."""

    target: Target
    parts: Sequence[Content]


_AFTER_TOMBSTONES: Final = 3600.0
"""Names are never used twice, so tombstones serve nobody; time in the spill store stands at 0 else."""

CIRCLE_SECONDS: Final = 5.0
_SENDING_BYTES: Final = 4096
"""What an output on its way costs beside its own bytes."""


class CirclePatience:
    """How long nothing may arrive before a stage goes on without room.

    Where something has arrived since the last one went on, that was a circle of full inboxes, and is likely
    to be one again: the next one waits half as long, down to ``CIRCLE_SECONDS / 64``. Where nothing has, it
    is the whole time again, so that no memory is filled with what cannot be sent.
    """

    def __init__(self) -> None:
        self.seconds = CIRCLE_SECONDS
        self._arrived = 0

    def goes_on(self, arrived: int) -> None:
        """A stage goes on; so many outputs have arrived so far."""
        shorter = max(self.seconds / 2, CIRCLE_SECONDS / 64)
        self.seconds = shorter if arrived > self._arrived else CIRCLE_SECONDS
        self._arrived = arrived


class Retainer:
    """The outputs of one node; ``spill`` is None where nothing may be written to disk."""

    def __init__(
        self, table: RetentionTable[Output], spill: ResultStore | None, tasks: asyncio.TaskGroup
    ) -> None:
        self._table = table
        self._spill = spill
        self._tasks = tasks
        self._room = Signal()
        self._sending_bytes = 0
        """Of all outputs on their way: until they have arrived they lie in memory, also if spilled."""
        self.under_way = UnderWay()
        """Is told of each output that is let go of."""
        self._arrived = 0
        """Outputs, so far."""
        self._patience = CirclePatience()
        self._targets: dict[OutputKey, Target] = {}
        self._names: dict[OutputKey, str] = {}
        self._serial = itertools.count()
        self._copying = asyncio.Lock()

    async def room(self) -> None:
        """Wait until stages may take new work.

        Where nothing that is on its way has arrived for long (``CirclePatience``), it may wait for room in
        the very inbox that the caller is to empty: that one goes on, with one more output than there is
        room for.
        """
        while not self._has_room():
            arrived = self._arrived
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience.seconds):
                    await self._room.wait_for(self._has_room)
            if arrived == self._arrived and self._table.has_room:
                self._patience.goes_on(arrived)
                return

    def _has_room(self) -> bool:
        is_idle = self._sending_bytes == 0
        return self._table.has_room and (is_idle or self._sending_bytes < self._table.memory_bytes_max)

    def sending(self, length: int) -> None:
        """An output of so many bytes is on its way, retained or not; as many are ``sent`` later."""
        self._sending_bytes += length + _SENDING_BYTES

    def sent(self, length: int) -> None:
        """It has arrived, or was given up."""
        self._arrived += 1
        self._sending_bytes -= length + _SENDING_BYTES
        self._room.notify()

    async def emptied(self) -> None:
        """Wait until nothing is retained: everything computed here is done with, elsewhere."""
        await self._room.wait_for(lambda: len(self._table) == 0)

    @property
    def held_bytes(self) -> int:
        """Bytes of all outputs held, in memory and on disk."""
        return self._table.held_bytes

    def metrics(self) -> Mapping[str, int]:
        """What is held, for people."""
        return {
            "outputs": len(self._table),
            "memory_bytes": self._table.memory_bytes,
            "disk_bytes": self._table.disk_bytes,
        }

    @property
    def has_room(self) -> bool:
        """Whether stages may take new work."""
        return self._has_room()

    @property
    def memory_bytes_max(self) -> int:
        """The bound on what is retained in memory, and on what is on its way."""
        return self._table.memory_bytes_max

    @property
    def disk_bytes_max(self) -> int:
        """The bound on what is spilled."""
        return self._table.bytes_max - self._table.memory_bytes_max

    @property
    def sending_bytes(self) -> int:
        """What outputs on their way take in memory."""
        return self._sending_bytes

    def held(self) -> Iterator[tuple[Target, Place, int]]:
        """Each output: where it goes, where it lies, and its bytes."""
        for key, place, length in self._table.entries():
            yield self._targets[key], place, length

    def keys(self) -> tuple[OutputKey, ...]:
        """What is held, oldest first."""
        return self._table.keys()

    def check_invariants(self) -> None:
        """What is held agrees with what is known of it."""
        self._table.check_invariants()
        assert self._targets.keys() == set(self.keys())

    def hold(self, key: OutputKey, target: Target, packed: PackedAnywhere) -> None:
        """Retain an output from now on."""
        self._targets[key] = target
        output = Output(target, packed.parts)
        self._carry_out(self._table.hold(key, output, packed.length))
        if not lies_in_host(output.parts):
            self._tasks.create_task(self._bring_home(key, output), name=f"copied {key}")

    async def _bring_home(self, key: OutputKey, output: Output) -> None:
        """Copy an output to the host, if it is still held in the device's memory when its turn comes."""
        async with self._copying:  # each takes a thread, and a copy in the host's memory
            found = self._table.find(key)
            if found is None or found[1] is not output:
                return
            try:
                copied = evolve(output, parts=await in_host(output.parts))
            except OnePieceError as error:  # it stays where it is, as long as the device has it
                get_logger().warning("retained_output_not_copied", output=str(key), error=error.message)
            else:
                self._table.exchange(key, output, copied)

    def release(self, key: OutputKey) -> None:
        """It is needed no longer."""
        self._forget([key], self._table.release(key))

    def release_request(self, uid: str) -> None:
        """Nothing of the request is needed any longer."""
        keys = self._table.keys_of(uid)
        self._forget(keys, self._table.release_request(uid))

    def release_all(self) -> None:
        """This node was declared dead: what it holds belongs to a life that is over."""
        for uid in self._table.uids():
            self.release_request(uid)

    def sources_of(self, uid: str) -> tuple[str, ...]:
        """The graph nodes of a request whose outputs are held."""
        return self._table.sources_of(uid)

    def holds(self, key: OutputKey) -> bool:
        """Whether an output is held."""
        return self._table.find(key) is not None

    def targets_of(self, uid: str, source: str) -> list[OutputKey]:
        """The outputs of one graph node of a request that are held."""
        return [key for key in self._table.keys_of(uid) if key.source == source]

    def owners(self) -> dict[str, str]:
        """The owner's control address, as the outputs name it, of each request with outputs here."""
        return {key.uid: target.header.owner for key, target in self._targets.items()}

    async def fetch(self, key: OutputKey) -> Output | None:
        """An output as it was held; None if it is not, or the disk lost it."""
        found = self._table.find(key)
        if found is None:
            return None
        place, output = found
        if output is not None:
            return output
        assert place is Place.DISK
        assert self._spill is not None
        target = self._targets[key]
        try:
            pieces = [piece async for piece in self._spill.read(self._names[key])]
        except (OnePieceError, KeyError) as error:
            get_logger().error("retained_output_unreadable", output=str(key), error=str(error))
            self.release(key)
            return None
        return Output(target, pieces) if self.holds(key) else None  # it may have been let go of meanwhile

    def _forget(self, keys: Sequence[OutputKey], effects: Sequence[RetentionEffect]) -> None:
        for key in keys:
            self._targets.pop(key, None)
            self.under_way.done(key)
        self._carry_out(effects)
        self._room.notify()

    def _carry_out(self, effects: Sequence[RetentionEffect]) -> None:
        for effect in effects:
            if self._spill is None:
                if isinstance(effect, Spill):
                    self._table.spill_failed(effect.key)
                continue
            write = self._write if isinstance(effect, Spill) else self._remove
            self._tasks.create_task(write(effect.key), name=f"retained {effect.key}")

    async def _write(self, key: OutputKey) -> None:
        assert self._spill is not None
        found = self._table.find(key)
        if found is None or found[1] is None:
            return
        name = self._names[key] = f"retained-{next(self._serial)}"
        try:
            parts = await in_host(found[1].parts)
            await self._spill.put(
                name, parts, content_type=_SPILLED_TYPE, ttl_seconds=_SPILLED_SECONDS, now=0.0
            )
        except OnePieceError as error:
            get_logger().warning("retained_output_not_spilled", output=str(key), error=error.message)
            self._table.spill_failed(key)
        else:
            self._carry_out(self._table.spilled(key))
        self._room.notify()

    async def _remove(self, key: OutputKey) -> None:
        assert self._spill is not None
        name = self._names.pop(key, None)
        if name is None:
            return
        try:
            await self._spill.purge(name, 0.0)
            await self._spill.expire(_AFTER_TOMBSTONES)
        except OnePieceError as error:
            get_logger().warning("retained_output_not_removed", output=str(key), error=error.message)
