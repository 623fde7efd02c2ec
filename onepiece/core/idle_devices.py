"""Idle devices: which ones no actor uses, since when, and what job their node has lent them to.

It is told the devices and the actors whenever placement has changed, and what each node says of its jobs with
its heartbeats; it decides nothing. What it promises:

* A device is idle from the look that first finds no actor on it, loading and stopping ones included. A
  manager that restarts knows of no earlier one.
* Devices of a node that is gone are forgotten, and so is what that said: the devices there are bound it.
* A view names at most ``IDLE_SHOWN_MAX`` of them, those with a job first, and how many there are.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from attrs import define, field, frozen

from onepiece.core.lending import JobReport, LentReport
from onepiece.core.packing import Room

IDLE_SHOWN_MAX: Final = 64


@frozen
class IdleView:
    """A device that no actor uses; ``job`` is "" unless its node lends it.

    ``job`` is the state of the command there, ``job_seconds`` for how long it has been so, and ``ended`` how
    the command ended when it last did.
    """

    node: str
    device: str
    memory_bytes: int
    idle_seconds: float
    command: str = ""
    job: str = ""
    job_seconds: float = 0.0
    ended: str = ""


@define(eq=False)
class IdleDevices:
    """See the module's text."""

    _since: dict[tuple[str, str], tuple[float, int]] = field(factory=dict)
    """By node and device: when it was found idle, and its memory."""
    _lent: dict[str, LentReport] = field(factory=dict)

    def look(self, rooms: Iterable[Room], now: float) -> None:
        """These are the devices of all workers now, with who is on them."""
        since: dict[tuple[str, str], tuple[float, int]] = {}
        for room in rooms:
            if not room.stages:
                key = (room.node_id, room.device)
                since[key] = self._since.get(key, (now, room.memory_bytes))
        self._since = since

    def told(self, node_id: str, lent: LentReport | None) -> None:
        """What a node says of its jobs; None: it lends nothing."""
        if lent is None:
            self._lent.pop(node_id, None)
        else:
            self._lent[node_id] = lent

    def forget(self, node_id: str) -> None:
        """A node is gone."""
        self._lent.pop(node_id, None)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._since)

    def view(self, now: float) -> tuple[IdleView, ...]:
        """Those that are shown."""
        jobs = {(node, job.device): job for node, lent in self._lent.items() for job in lent.jobs}
        rows = [self._row(key, jobs, now) for key in self._since]
        rows.sort(key=lambda row: (row.job == "", row.node, row.device))
        return tuple(rows[:IDLE_SHOWN_MAX])

    def _row(self, key: tuple[str, str], jobs: Mapping[tuple[str, str], JobReport], now: float) -> IdleView:
        node, device = key
        since, memory_bytes = self._since[key]
        job = jobs.get(key)
        if job is None:
            return IdleView(node, device, memory_bytes, max(0.0, now - since))
        return IdleView(
            node,
            device,
            memory_bytes,
            max(0.0, now - since),
            command=self._lent[node].command,
            job=job.state.value,
            job_seconds=job.seconds,
            ended=job.ended,
        )
