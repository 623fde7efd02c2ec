"""Lending: a job where no actor is, gone before one comes, begun again with ever longer pauses."""

import pytest

from onepiece.core.lending import (
    PAUSE_SECONDS_MAX,
    STEADY_SECONDS,
    DeviceReleased,
    DeviceTaken,
    JobEnded,
    JobState,
    KillJob,
    LeaveJob,
    LendingBounds,
    LendingClosed,
    LendingEffect,
    LendingEvent,
    LendingMachine,
    LendingTick,
    StartJob,
    TerminateJob,
)

GPU, OTHER = "cuda:0", "cuda:1"
BOUNDS = LendingBounds(idle_seconds=30.0, stop_seconds=5.0, kill_seconds=2.0)


class Lending:
    """A machine on virtual time: each of its deadlines comes to pass."""

    def __init__(self, *devices: str) -> None:
        self.machine = LendingMachine.of(devices or (GPU,), BOUNDS, 0.0)
        self.now = 0.0
        self.done: list[tuple[float, LendingEffect]] = []

    def tell(self, event: LendingEvent) -> None:
        """It happens now."""
        self.done += [(self.now, effect) for effect in self.machine.handle(event, self.now)]

    def until(self, moment: float) -> list[tuple[float, LendingEffect]]:
        """Let time pass; what was done since the last call, and when."""
        while (due_at := self.machine.next_deadline(self.now)) is not None and due_at <= moment:
            self.now = due_at
            self.tell(LendingTick())
        self.now = moment
        done, self.done = self.done, []
        return done


def test_what_becomes_of_a_job_is_told_with_for_how_long() -> None:
    """None, running, stopping, killed, left: each since it came to be so."""
    lending = Lending()
    lending.until(35.0)
    assert lending.machine.states(lending.now) == {GPU: (JobState.RUNNING, 5.0)}
    lending.tell(DeviceTaken(GPU))
    lending.until(37.0)
    assert lending.machine.states(lending.now) == {GPU: (JobState.STOPPING, 2.0)}
    lending.until(41.0)
    assert lending.machine.states(lending.now) == {GPU: (JobState.KILLED, 1.0)}
    lending.until(44.0)
    assert lending.machine.states(lending.now) == {GPU: (JobState.LEFT, 2.0)}
    lending.tell(JobEnded(GPU))
    assert lending.machine.states(lending.now) == {GPU: (JobState.NONE, 0.0)}


def test_a_job_begins_where_no_actor_has_been_for_a_while() -> None:
    """Thirty seconds behind the node's start, or behind the last actor's end; each device by itself."""
    lending = Lending(GPU, OTHER)
    lending.tell(DeviceTaken(OTHER))
    assert lending.until(100.0) == [(30.0, StartJob(GPU))]
    lending.tell(DeviceTaken(OTHER))
    lending.tell(DeviceReleased(OTHER))
    assert lending.until(200.0) == []
    lending.tell(DeviceReleased(OTHER))
    assert lending.until(300.0) == [(230.0, StartJob(OTHER))]


def test_an_actor_that_comes_in_time_lets_none_begin() -> None:
    """A device that is used now and then is not lent in between."""
    lending = Lending()
    for moment in (20.0, 60.0, 100.0):
        lending.until(moment)
        lending.tell(DeviceTaken(GPU))
        lending.until(moment + 15.0)
        lending.tell(DeviceReleased(GPU))
    assert lending.until(130.0) == []


def test_a_job_that_follows_is_gone_at_once() -> None:
    """It is asked to end when an actor comes, and the device is free when it has."""
    lending = Lending()
    lending.until(40.0)
    lending.tell(DeviceTaken(GPU))
    assert not lending.machine.is_free(GPU)
    assert lending.until(41.0) == [(40.0, TerminateJob(GPU))]
    lending.tell(JobEnded(GPU))
    assert lending.machine.is_free(GPU)
    assert lending.until(500.0) == []
    lending.tell(DeviceReleased(GPU))
    assert lending.until(600.0) == [(530.0, StartJob(GPU))]


def test_an_actor_waits_for_no_longer_than_the_bound() -> None:
    """A job that does not end is killed; one that does not even die then is left, with no other beside."""
    lending = Lending()
    lending.until(40.0)
    lending.tell(DeviceTaken(GPU))
    done = lending.until(46.9)
    assert done == [(40.0, TerminateJob(GPU)), (45.0, KillJob(GPU))]
    assert not lending.machine.is_free(GPU)
    assert lending.until(47.0) == [(47.0, LeaveJob(GPU))]
    assert lending.machine.is_free(GPU)
    lending.tell(DeviceReleased(GPU))
    assert lending.until(500.0) == []
    lending.tell(JobEnded(GPU))
    assert lending.until(600.0) == [(530.0, StartJob(GPU))]


def test_an_actor_that_leaves_while_the_job_ends_does_not_call_it_back() -> None:
    """What was asked to end ends; the next one begins when the device has rested."""
    lending = Lending()
    lending.until(40.0)
    lending.tell(DeviceTaken(GPU))
    lending.tell(DeviceReleased(GPU))
    assert lending.until(43.0) == [(40.0, TerminateJob(GPU))]
    lending.tell(JobEnded(GPU))
    assert lending.until(100.0) == [(73.0, StartJob(GPU))]


def test_jobs_that_end_by_themselves_begin_ever_more_seldom() -> None:
    """Pauses double up to their bound; behind a job that lasted they begin small again."""
    lending = Lending()
    lending.until(30.0)
    pauses = []
    for _ in range(12):
        ended_at = lending.now
        lending.tell(JobEnded(GPU))
        due_at = lending.machine.next_deadline(lending.now)
        assert due_at is not None
        pauses.append(due_at - ended_at)
        assert lending.until(due_at) == [(due_at, StartJob(GPU))]
    assert pauses == [min(2.0**n, PAUSE_SECONDS_MAX) for n in range(12)]
    lending.until(lending.now + STEADY_SECONDS)
    lending.tell(JobEnded(GPU))
    assert lending.machine.next_deadline(lending.now) == lending.now + 1.0


def test_an_actor_does_not_shorten_a_pause() -> None:
    """A command that fails at once is not begun again sooner because an actor came and went."""
    lending = Lending()
    lending.until(30.0)
    for _ in range(9):
        lending.tell(JobEnded(GPU))
        lending.until(lending.machine.next_deadline(lending.now) or 0.0)
    ended_at = lending.now
    lending.tell(JobEnded(GPU))
    lending.tell(DeviceTaken(GPU))
    lending.tell(DeviceReleased(GPU))
    assert lending.machine.next_deadline(lending.now) == ended_at + PAUSE_SECONDS_MAX


@pytest.mark.parametrize("is_taken", [False, True])
def test_the_end_of_the_node_ends_all(is_taken: bool) -> None:
    """Running jobs are told to end, within the same bounds; none begins any more."""
    lending = Lending(GPU, OTHER)
    lending.until(40.0)
    if is_taken:
        lending.tell(DeviceTaken(GPU))
    lending.tell(LendingClosed())
    assert {effect for _, effect in lending.until(41.0)} == {TerminateJob(GPU), TerminateJob(OTHER)}
    lending.tell(JobEnded(OTHER))
    assert lending.machine.jobs == {GPU}
    if is_taken:
        lending.tell(DeviceReleased(GPU))
    assert lending.until(500.0) == [(45.0, KillJob(GPU)), (47.0, LeaveJob(GPU))]
    assert lending.machine.jobs == frozenset()


def test_devices_that_are_not_lent_are_free() -> None:
    """An order may name a device that this node has not; that is not for the lender to tell."""
    lending = Lending()
    lending.tell(DeviceTaken("cuda:7"))
    lending.tell(DeviceReleased("cuda:7"))
    assert lending.machine.is_free("cuda:7")
    lending.until(100.0)
    lending.machine.story.replay()
