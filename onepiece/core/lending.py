"""Lending: a low-priority job on each device that no actor uses, out of the way before one comes.

::

         no actor for a while         an actor comes           not in ``stop_seconds``
    none --------------------> running --------------> stopping -----------------------> killed
      ^                           |                        |                               |
      +---- it ends by itself ----+------- it ends --------+----------- it ends -----------+
      |     (then a pause)                                                                 |
      +----------------------------------- it ends ------- left <-- not in ``kill_seconds`` +

What this promises:

* A job runs only where no actor is, or until the one that has come has waited for ``stop_seconds`` and
  ``kill_seconds`` at most: then the device is the actor's, whatever became of the job.
* A device has one job at a time; one that is left (it hangs in the kernel, in a driver for instance) gets no
  other before it has ended.
* A job that ends by itself is begun again after a pause, which doubles from ``PAUSE_SECONDS`` to
  ``PAUSE_SECONDS_MAX`` for as long as jobs there last less than ``STEADY_SECONDS``.

What it does not know: what a job does, and whether it is of use.
"""

import enum
import math
from collections.abc import Iterable
from typing import Final, Self, TypeAlias

from attrs import define, evolve, field, frozen

from onepiece.core.machine import Machine

PAUSE_SECONDS: Final = 1.0
PAUSE_SECONDS_MAX: Final = 300.0
STEADY_SECONDS: Final = 60.0
COMMAND_CHARACTERS_MAX: Final = 200


class JobState(enum.StrEnum):
    """Where a device's job is; see the module's text."""

    NONE = "none"
    RUNNING = "running"
    STOPPING = "stopping"
    KILLED = "killed"
    LEFT = "left"


@frozen
class DeviceTaken:
    """An actor is to come to a device, beside those that are there."""

    device: str


@frozen
class DeviceReleased:
    """An actor has gone."""

    device: str


@frozen
class JobEnded:
    """A device's job has ended, or could not be begun."""

    device: str


@frozen
class LendingClosed:
    """The node ends: no job begins any more, and all are told to end."""


@frozen
class LendingTick:
    """Time has passed."""


LendingEvent: TypeAlias = DeviceTaken | DeviceReleased | JobEnded | LendingClosed | LendingTick


@frozen
class StartJob:
    """Begin the command on a device."""

    device: str


@frozen
class TerminateJob:
    """Ask a device's job to end."""

    device: str


@frozen
class KillJob:
    """End a device's job."""

    device: str


@frozen
class LeaveJob:
    """A device's job does not even end when it is killed: it is waited for no longer."""

    device: str


LendingEffect: TypeAlias = StartJob | TerminateJob | KillJob | LeaveJob


@frozen
class LendingBounds:
    """How long, in seconds: without an actor before a job begins; to end when asked to; when killed."""

    idle_seconds: float = 30.0
    stop_seconds: float = 5.0
    kill_seconds: float = 2.0


@frozen
class JobReport:
    """What became of a device's job: its state, for how long that has been so, and how it last ended."""

    device: str
    state: JobState
    seconds: float
    ended: str = ""


@frozen
class LentReport:
    """What a node that lends says of it; ``command`` is cut to ``COMMAND_CHARACTERS_MAX``."""

    command: str
    jobs: tuple[JobReport, ...]


@frozen
class _Lent:
    """One device."""

    actors: int = 0
    job: JobState = JobState.NONE
    due_at: float = math.inf
    """When there is something to do, if nothing happens before: a job begins, is killed, or is left."""
    began_at: float = 0.0
    changed_at: float = 0.0
    """When the job came to be as it is."""
    paused_until: float = -math.inf
    pause_seconds: float = PAUSE_SECONDS


@define(eq=False)
class LendingMachine(Machine[LendingEvent, LendingEffect]):
    """The devices of one node; see the module's text."""

    bounds: LendingBounds
    _devices: dict[str, _Lent] = field(factory=dict)
    _is_closed: bool = False

    @classmethod
    def of(cls, devices: Iterable[str], bounds: LendingBounds, now: float) -> Self:
        """A machine of devices that no actor uses since ``now``."""
        return cls(
            bounds, {name: _Lent(due_at=now + bounds.idle_seconds, changed_at=now) for name in devices}
        )

    def is_free(self, device: str) -> bool:
        """Whether an actor may use a device: it has no job that is waited for; true of unknown ones."""
        found = self._devices.get(device)
        return found is None or found.job in {JobState.NONE, JobState.LEFT}

    @property
    def jobs(self) -> frozenset[str]:
        """The devices whose job is waited for."""
        return frozenset(name for name in self._devices if not self.is_free(name))

    def states(self, now: float) -> dict[str, tuple[JobState, float]]:
        """Of each device: the state of its job, and for how many seconds it has been so."""
        return {name: (lent.job, max(0.0, now - lent.changed_at)) for name, lent in self._devices.items()}

    def next_deadline(self, now: float) -> float | None:
        """When the next job begins, is killed, or is left."""
        due = min((each.due_at for each in self._devices.values()), default=math.inf)
        return None if due == math.inf else max(due, now)

    def check_invariants(self) -> None:
        """No job runs beside an actor, or behind the end, that was not told to end."""
        for each in self._devices.values():
            assert each.actors >= 0
            assert each.job is not JobState.RUNNING or (each.actors == 0 and not self._is_closed)
            assert (each.job in {JobState.STOPPING, JobState.KILLED}) <= (each.due_at < math.inf)

    def _react(self, event: LendingEvent, now: float) -> list[LendingEffect]:
        match event:
            case LendingTick():
                return [effect for name in self._devices for effect in self._due(name, now)]
            case LendingClosed():
                self._is_closed = True
                return [effect for name in self._devices for effect in self._cleared(name, now)]
            case DeviceTaken(device) if device in self._devices:
                self._devices[device] = evolve(self._devices[device], actors=self._devices[device].actors + 1)
                return self._cleared(device, now)
            case DeviceReleased(device) if device in self._devices:
                lent = evolve(self._devices[device], actors=self._devices[device].actors - 1)
                self._devices[device] = self._resting(lent, now + self.bounds.idle_seconds)
                return []
            case JobEnded(device):
                self._devices[device] = self._ended(self._devices[device], now)
                return []
            case _:
                return []  # a device that is not lent

    def _cleared(self, name: str, now: float) -> list[LendingEffect]:
        """No job is wanted there now."""
        lent = self._devices[name]
        if lent.job is JobState.RUNNING:
            due_at = now + self.bounds.stop_seconds
            self._devices[name] = evolve(lent, job=JobState.STOPPING, due_at=due_at, changed_at=now)
            return [TerminateJob(name)]
        if lent.job is JobState.NONE:
            self._devices[name] = evolve(lent, due_at=math.inf)
        return []

    def _due(self, name: str, now: float) -> list[LendingEffect]:
        lent = self._devices[name]
        if now < lent.due_at:
            return []
        match lent.job:
            case JobState.NONE:
                running = evolve(lent, job=JobState.RUNNING, due_at=math.inf, began_at=now, changed_at=now)
                self._devices[name] = running
                return [StartJob(name)]
            case JobState.STOPPING:
                due_at = now + self.bounds.kill_seconds
                self._devices[name] = evolve(lent, job=JobState.KILLED, due_at=due_at, changed_at=now)
                return [KillJob(name)]
            case _:
                self._devices[name] = evolve(lent, job=JobState.LEFT, due_at=math.inf, changed_at=now)
                return [LeaveJob(name)]

    def _resting(self, lent: _Lent, at: float) -> _Lent:
        """Let a job begin then, if nobody is there and none is."""
        if lent.job is not JobState.NONE or lent.actors or self._is_closed:
            return lent
        return evolve(lent, due_at=max(at, lent.paused_until))

    def _ended(self, lent: _Lent, now: float) -> _Lent:
        ended_itself = lent.job is JobState.RUNNING
        lent = evolve(lent, job=JobState.NONE, due_at=math.inf, changed_at=now)
        if not ended_itself:
            return self._resting(lent, now + self.bounds.idle_seconds)
        was_steady = now - lent.began_at >= STEADY_SECONDS
        pause = PAUSE_SECONDS if was_steady else lent.pause_seconds
        longer = min(2 * pause, PAUSE_SECONDS_MAX)
        return self._resting(evolve(lent, paused_until=now + pause, pause_seconds=longer), now)
