"""The parts of chaos that decide: which fault comes next, and what the verdict is."""

import os
import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulations.chaos import sockets
from simulations.chaos.faults import (
    HURT_MAX,
    PROXIES_HURT_MAX,
    STORES_HURT_MAX,
    FaultKind,
    Target,
    draw_fault,
)
from simulations.chaos.ledger import FINISHED, Happening, Kill, Submission, judge, percentile

LEASE_SECONDS = 3.0
ROLES = {
    "manager": frozenset({"manager", "store"}),
    "proxy-1": frozenset({"proxy", "store"}),
    "proxy-2": frozenset({"proxy", "store"}),
    "worker-1": frozenset({"worker"}),
    "worker-2": frozenset({"worker"}),
    "worker-3": frozenset({"worker"}),
}


def targets(hurt: set[str]) -> list[Target]:
    """The set, of which these nodes are hurt."""
    return [Target(name, roles, name in hurt) for name, roles in ROLES.items()]


@given(seed=st.integers(0, 1 << 32))
def test_never_too_much_is_hurt(seed: int) -> None:
    """However faults are drawn, a copy of everything and a proxy stay: the bounds hold at any time."""
    rng, hurt = random.Random(seed), set[str]()
    for _ in range(50):
        fault = draw_fault(rng, targets(hurt), list(FaultKind), LEASE_SECONDS)
        assert fault is not None
        assert fault.name not in hurt
        if fault.kind is not FaultKind.CUT:
            hurt.add(fault.name)
        assert len(hurt) <= HURT_MAX
        assert sum("store" in ROLES[name] for name in hurt) <= STORES_HURT_MAX
        assert sum("proxy" in ROLES[name] for name in hurt) <= PROXIES_HURT_MAX
        if hurt and rng.random() < 0.3:
            hurt.discard(min(hurt))


def test_every_node_gets_its_share() -> None:
    """No role is spared, and a pause outlasts the lease."""
    rng = random.Random(1)
    drawn = [draw_fault(rng, targets(set()), [FaultKind.PAUSE], LEASE_SECONDS) for _ in range(200)]
    faults = [fault for fault in drawn if fault is not None]
    assert {fault.name for fault in faults} == ROLES.keys()
    assert all(fault.seconds > LEASE_SECONDS for fault in faults)


def test_nobody_is_hurt_where_nobody_may_be() -> None:
    """With the bound reached only connections are cut, and without that kind nothing happens."""
    hurt = {"worker-1", "worker-2"}
    rng = random.Random(1)
    assert draw_fault(rng, targets(hurt), [FaultKind.KILL, FaultKind.PAUSE], LEASE_SECONDS) is None
    cut = draw_fault(rng, targets(hurt), list(FaultKind), LEASE_SECONDS)
    assert cut is not None
    assert cut.kind is FaultKind.CUT


def ended(end: str | None, **more: object) -> Submission:
    """A request that was accepted and ended so."""
    submission = Submission("key", 1, uid="uid", end=end, ended_at=2.0, submitted_at=1.0)
    for name, value in more.items():
        setattr(submission, name, value)
    return submission


@pytest.mark.parametrize(
    ("submission", "counted"),
    [
        (ended(FINISHED, other_ends={FINISHED}), ""),
        (ended("StageFailed", other_ends={"StageFailed"}), ""),
        (ended(None), "lost"),
        (ended(FINISHED, other_ends={"StageFailed"}), "duplicated"),
        (ended("NodeLost", other_ends={FINISHED}), "duplicated"),
        (ended(FINISHED, is_corrupt=True), "corrupt"),
        (Submission("key", 1), ""),
    ],
    ids=["finished", "failed", "no end", "two ends", "two ends too", "wrong bytes", "never accepted"],
)
def test_verdict(submission: Submission, counted: str) -> None:
    """One end that all proxies tell is well; none, two, and wrong bytes each have their name."""
    verdict = judge([submission], [])
    found = {"lost": verdict.lost, "duplicated": verdict.duplicated, "corrupt": verdict.corrupt}
    assert found == {name: int(name == counted) for name in found}
    assert verdict.holds is (counted == "")


def test_recovery_is_from_the_death_to_the_next_start() -> None:
    """Only stages that waited or ran on the node that was killed count, and each until it starts again."""
    submission = ended(FINISHED)
    submission.events = [
        Happening("stage_started", "split", "a", 1.0),
        Happening("stage_finished", "split", "a", 2.0),
        Happening("stage_started", "left", "a", 2.5),
        Happening("queued", "right", "b", 2.6),
        Happening("stage_started", "left", "c", 7.0),
        Happening("stage_started", "right", "b", 8.0),
    ]
    verdict = judge([submission], [Kill("a", 3.0)])
    assert verdict.recoveries == (4.0,)
    assert (verdict.stage_runs, verdict.repeated) == (4, 1)


def test_percentiles() -> None:
    """They are values that occurred."""
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]


def test_a_connection_is_ended_from_outside() -> None:
    """Both ends see the end of it, though neither closed it."""
    if not sockets.may_shut_down():
        pytest.skip("this user may not take descriptors of other processes (pidfd_getfd)")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
    ):
        other, _ = server.accept()
        with other:
            assert {one.fileno(), other.fileno()} <= set(sockets.connections(os.getpid()))
            assert sockets.shut_down(os.getpid(), one.fileno())
            assert (one.recv(1), other.recv(1)) == (b"", b"")
