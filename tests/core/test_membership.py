from attrs import evolve
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from onepiece.core import (
    Expel,
    HeartbeatReceived,
    MembershipConfig,
    MembershipMachine,
    NodeDied,
    NodeJoined,
    NodeLeft,
    NodeState,
    Tick,
)
from onepiece.core.membership import TRANSITIONS, MembershipEffect, _Trigger
from tests.core.cluster import make_node

_CONFIG = MembershipConfig(
    heartbeat_seconds=0.5, suspect_seconds=2.0, lease_seconds=5.0, stall_seconds=1.0, nodes_max=3
)


def _machine() -> MembershipMachine:
    return MembershipMachine(config=_CONFIG)


def test_every_pair_has_its_place() -> None:
    """Each living state knows each trigger but those that cannot meet it; the dead know none."""
    impossible = {
        (NodeState.ALIVE, _Trigger.LEASE_ENDED),
        (NodeState.DRAINING, _Trigger.LEASE_ENDED),
        (NodeState.DRAINED, _Trigger.LEASE_ENDED),
        (NodeState.SUSPECT, _Trigger.FELL_SILENT),
        *((NodeState.DEAD, trigger) for trigger in _Trigger),
    }
    every = {(state, trigger) for state in NodeState for trigger in _Trigger}
    assert TRANSITIONS.keys() == every - impossible


def test_a_late_heartbeat_counts_before_the_lease() -> None:
    """A heartbeat handled at the very end of the lease keeps the node: it was there, not dead."""
    machine = _machine()
    machine.handle(HeartbeatReceived(make_node("a")), 0.0)
    machine.handle(Tick(), 2.0)
    machine.handle(HeartbeatReceived(make_node("a")), 5.0)
    assert machine.members["a"].state is NodeState.ALIVE


def test_nobody_expires_at_start() -> None:
    """However late it is, a lease begins when a node is first heard; before, nobody has one (fault 37)."""
    machine = _machine()
    assert machine.next_deadline(0.0) is None
    late = 1e9
    assert machine.handle(Tick(), late) == []
    assert machine.handle(HeartbeatReceived(make_node("a")), late) == [NodeJoined(make_node("a"))]
    machine.check_invariants()
    machine.handle(Tick(), late + machine.config.suspect_seconds)
    assert machine.members["a"].state is NodeState.SUSPECT, "it has all of its lease"


def test_full_set_refuses_a_further_node() -> None:
    """At the bound a new node is told so, may try again, and nobody else is harmed."""
    machine = _machine()
    for name in "abc":
        machine.handle(HeartbeatReceived(make_node(name)), 0.0)
    (expel,) = machine.handle(HeartbeatReceived(make_node("d")), 0.5)
    assert isinstance(expel, Expel)
    assert expel.may_rejoin
    assert "3 nodes" in expel.reason
    assert set(machine.members) == {"a", "b", "c"}


def test_the_longest_dead_make_room() -> None:
    """Dead nodes are remembered for the fence, but not at the cost of living ones."""
    machine = _machine()
    for n, name in enumerate("abc"):
        machine.handle(HeartbeatReceived(make_node(name)), n / 10)
    machine.handle(NodeLeft("b", 1), 0.3)
    machine.handle(NodeLeft("a", 1), 0.4)
    effects = machine.handle(HeartbeatReceived(make_node("d")), 0.5)
    assert [type(effect) for effect in effects] == [NodeJoined]
    assert set(machine.members) == {"b", "c", "d"}


def test_identity_is_fixed_for_one_incarnation() -> None:
    """A node that changes its roles or devices without a new incarnation is not believed."""
    machine = _machine()
    machine.handle(HeartbeatReceived(make_node("a")), 0.0)
    machine.handle(HeartbeatReceived(make_node("a", roles=("proxy",))), 0.5)
    assert machine.members["a"].node.roles == ("worker",)


def test_a_good_bye_of_an_older_incarnation_is_ignored() -> None:
    """A late good-bye does not take the newer incarnation with it."""
    machine = _machine()
    machine.handle(HeartbeatReceived(make_node("a", incarnation=2)), 0.0)
    assert machine.handle(NodeLeft("a", 1), 0.1) == []
    assert machine.is_member("a", 2)


def test_two_processes_of_one_id_do_not_take_turns() -> None:
    """The later one stays; the earlier one must stop, also under an incarnation of its own making."""
    machine = _machine()
    earlier, later, last = (
        evolve(make_node("a"), process_id=number, incarnation=number) for number in (1, 2, 3)
    )
    machine.handle(HeartbeatReceived(earlier), 0.0)
    machine.handle(HeartbeatReceived(later), 0.1)
    machine.handle(HeartbeatReceived(last), 0.2)
    for back in (earlier, evolve(earlier, incarnation=8), later, evolve(later, incarnation=9)):
        (expel,) = machine.handle(HeartbeatReceived(back), 0.3)
        assert isinstance(expel, Expel)
        assert (expel.incarnation, expel.may_rejoin) == (back.incarnation, False)
        assert "a node id of its own" in expel.reason
        assert machine.is_member("a", 3)
    anew = evolve(last, incarnation=4)
    assert [type(effect) for effect in machine.handle(HeartbeatReceived(anew), 0.4)] == [NodeDied, NodeJoined]
    (expel,) = machine.handle(HeartbeatReceived(evolve(earlier, incarnation=10)), 0.5)
    assert isinstance(expel, Expel), "a process that joins anew keeps its place"


def test_an_id_whose_process_has_died_is_free() -> None:
    """Whoever was replaced may have the id back once the other one is dead."""
    machine = _machine()
    earlier, later = (evolve(make_node("a"), process_id=number, incarnation=number) for number in (1, 2))
    machine.handle(HeartbeatReceived(earlier), 0.0)
    machine.handle(HeartbeatReceived(later), 0.1)
    machine.handle(NodeLeft("a", 2), 0.2)
    machine.handle(HeartbeatReceived(evolve(earlier, incarnation=3)), 0.3)
    assert machine.is_member("a", 3)


class MembershipModel(RuleBasedStateMachine):
    """Random nodes, incarnations and pauses: what must hold whatever comes."""

    @initialize()
    def begin(self) -> None:
        """Nothing is known yet."""
        self.machine = _machine()
        self.now = 0.0
        self.ended: set[tuple[str, int]] = set()
        self.joined: dict[str, int] = {}

    def _handle(self, event: HeartbeatReceived | NodeLeft | Tick) -> list[MembershipEffect]:
        effects = self.machine.handle(event, self.now)
        for effect in effects:
            match effect:
                case NodeJoined(node):
                    assert (node.node_id, node.incarnation) not in self.ended, "the dead do not come back"
                    self.joined[node.node_id] = node.incarnation
                case NodeDied(node_id, incarnation):
                    assert self.joined.pop(node_id) == incarnation, "who dies was a member, and dies once"
                    self.ended.add((node_id, incarnation))
        return effects

    @rule(
        name=st.sampled_from("abc"),
        incarnation=st.integers(1, 4),
        process_id=st.integers(1, 3),
        draining=st.booleans(),
        drained=st.booleans(),
    )
    def hear(self, name: str, incarnation: int, process_id: int, draining: bool, drained: bool) -> None:
        """Any process may be heard at any time."""
        node = evolve(make_node(name, incarnation=incarnation), process_id=process_id)
        effects = self._handle(HeartbeatReceived(node, draining=draining, drained=drained))
        was_expelled = any(isinstance(effect, Expel) for effect in effects)
        assert was_expelled != self.machine.is_member(name, incarnation), "a member or told that it is none"

    @rule(name=st.sampled_from("abc"), incarnation=st.integers(1, 4))
    def leave(self, name: str, incarnation: int) -> None:
        """Any process may say good-bye."""
        self._handle(NodeLeft(name, incarnation))
        assert not self.machine.is_member(name, incarnation)

    @rule(seconds=st.floats(0.0, 3.0))
    def wait(self, seconds: float) -> None:
        """Time passes, and the driver calls at each deadline."""
        end = self.now + seconds
        while (deadline := self.machine.next_deadline(self.now)) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self._handle(Tick())
        self.now = end
        self._handle(Tick())

    @rule(seconds=st.floats(8.0, 60.0))
    def stall(self, seconds: float) -> None:
        """The driver is late: nobody dies of that."""
        before = dict(self.joined)
        self.now += seconds
        self._handle(Tick())
        assert self.joined == before

    @invariant()
    def members_are_those_that_joined_and_did_not_die(self) -> None:
        """What the notices told is what the machine says."""
        living = {
            node_id: member.node.incarnation
            for node_id, member in self.machine.members.items()
            if member.state is not NodeState.DEAD
        }
        assert living == self.joined

    @invariant()
    def nobody_is_silent_beyond_the_lease(self) -> None:
        """Whoever is called at each deadline never holds a node beyond its lease."""
        for member in self.machine.members.values():
            if member.state is not NodeState.DEAD:
                assert self.now - member.heard_at < _CONFIG.lease_seconds

    def teardown(self) -> None:
        """The story leads to the same members again."""
        if self.machine.story.entries:
            replayed = self.machine.story.replay()
            assert isinstance(replayed, MembershipMachine)
            assert replayed.members == self.machine.members


TestMembershipModel = MembershipModel.TestCase


def test_config_relations_are_asserted() -> None:
    """A lease shorter than the suspicion before it is refused where it is written."""
    try:
        evolve(_CONFIG, lease_seconds=1.0)
    except AssertionError:
        return
    raise AssertionError("a lease shorter than suspicion was accepted")
