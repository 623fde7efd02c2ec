"""Lends devices that no actor uses to a low-priority job: carries out what ``LendingMachine`` decides.

Whoever is about to put an actor on devices takes them (``taken``), and waits until they are free
(``freed``), which they are within the machine's bounds. Leaving ``lent`` ends every job within the
same bounds, at once if the node is to stop at once.
"""

import asyncio
import contextlib
import shlex
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from onepiece.core.inventory import Device
from onepiece.core.lending import (
    COMMAND_CHARACTERS_MAX,
    DeviceReleased,
    DeviceTaken,
    JobEnded,
    JobReport,
    KillJob,
    LeaveJob,
    LendingBounds,
    LendingClosed,
    LendingEffect,
    LendingEvent,
    LendingMachine,
    LendingTick,
    LentReport,
    StartJob,
    TerminateJob,
)
from onepiece.log import get_logger
from onepiece.node.options import NodeOptions
from onepiece.runtime.environment import Clock
from onepiece.runtime.lent_job import LentJob
from onepiece.runtime.signal import Signal


class Lender:
    """The lent devices of one node; use ``lent``."""

    def __init__(self, command: Sequence[str], machine: LendingMachine, clock: Clock) -> None:
        self._command = command
        self._machine = machine
        self._clock = clock
        self._jobs: dict[str, LentJob] = {}
        self._ended: dict[str, str] = {}
        """How a device's job last ended."""
        self._changed = Signal()
        self._wake = asyncio.Event()

    @contextlib.contextmanager
    def taken(self, devices: Sequence[str]) -> Iterator[None]:
        """An actor is to be on these devices, or to come there: their jobs are told to end."""
        for device in devices:
            self._handle(DeviceTaken(device))
        try:
            yield
        finally:
            for device in devices:
                self._handle(DeviceReleased(device))

    def report(self) -> LentReport:
        """What the next heartbeat says."""
        states = self._machine.states(self._clock())
        jobs = tuple(
            JobReport(device, state, seconds, self._ended.get(device, ""))
            for device, (state, seconds) in states.items()
        )
        return LentReport(shlex.join(self._command)[:COMMAND_CHARACTERS_MAX], jobs)

    async def freed(self, devices: Sequence[str]) -> None:
        """Wait until none of these devices has a job."""
        await self._changed.wait_for(lambda: all(map(self._machine.is_free, devices)))

    async def run(self) -> None:
        """Begin and end jobs when it is time, until cancelled."""
        while True:
            self._wake.clear()
            now = self._clock()
            due_at = self._machine.next_deadline(now)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if due_at is None else due_at - now):
                    await self._wake.wait()
            self._handle(LendingTick())

    async def close(self, *, at_once: bool) -> None:
        """End all jobs, and begin none any more; cancelled, they are killed at once."""
        self._handle(LendingClosed())
        try:
            if not at_once:
                await self._changed.wait_for(lambda: not self._machine.jobs)
        finally:
            for job in self._jobs.values():
                job.kill()
        await self._changed.wait_for(lambda: not self._machine.jobs)
        for job in self._jobs.values():
            job.leave()

    def _handle(self, event: LendingEvent) -> None:
        for effect in self._machine.handle(event, self._clock()):
            self._carry_out(effect)
        self._changed.notify()
        self._wake.set()

    def _carry_out(self, effect: LendingEffect) -> None:
        match effect:
            case StartJob(device):
                self._start(device)
            case TerminateJob(device):
                get_logger().info("lent_job_stopping", device=device)
                self._tell(device, LentJob.terminate)
            case KillJob(device):
                get_logger().warning("lent_job_killed", device=device)
                self._tell(device, LentJob.kill)
            case LeaveJob(device):
                get_logger().error("lent_job_left", device=device, process_id=self._jobs[device].process_id)

    def _tell(self, device: str, do: Callable[[LentJob], None]) -> None:
        job = self._jobs.get(device)
        if job is not None:
            do(job)

    def _start(self, device: str) -> None:
        def ended() -> None:
            job = self._jobs.pop(device)
            self._ended[device] = job.how
            get_logger().info("lent_job_ended", device=device, how=job.how)
            self._handle(JobEnded(device))

        try:
            job = self._jobs[device] = LentJob(self._command, device, ended)
        except OSError as error:
            self._ended[device] = f"not started: {error}"[:COMMAND_CHARACTERS_MAX]
            get_logger().warning("lent_job_not_started", device=device, error=str(error))
            asyncio.get_running_loop().call_soon(self._handle, JobEnded(device))
            return
        get_logger().info("lent_job_started", device=device, process_id=job.process_id)


@contextlib.asynccontextmanager
async def lent(
    options: NodeOptions, devices: Sequence[Device], clock: Clock, stops_at_once: asyncio.Event
) -> AsyncIterator[Lender | None]:
    """Lend these devices, if the options say so; leaving the block ends every job.

    Args:
        options: With the command, and how long is waited for what.
        devices: No actor uses them yet.
        clock: The loop's.
        stops_at_once: Set if jobs are not to be asked to end, but killed.
    """
    if not options.lend:
        yield None
        return
    bounds = LendingBounds(options.lend_idle_seconds, options.lend_stop_seconds)
    machine = LendingMachine.of([device.name for device in devices], bounds, clock())
    lender = Lender(options.lend, machine, clock)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(lender.run(), name="lending")
        try:
            yield lender
        finally:
            await lender.close(at_once=stops_at_once.is_set())
            running.cancel()
