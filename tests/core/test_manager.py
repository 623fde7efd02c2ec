"""Random histories of a whole set; at their end, peace: everything must then come right."""

from collections.abc import Mapping
from typing import Any

import pytest
from attrs import evolve
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from onepiece.core import (
    ActorLife,
    ActorReport,
    ActorState,
    ConfirmWorkflow,
    DemandChanged,
    DeviceKind,
    HeartbeatReceived,
    ManagerConfig,
    ManagerEffect,
    ManagerMachine,
    ManagerState,
    MembershipConfig,
    PlacementConfig,
    RefuseWorkflow,
    RegisteredWorkflow,
    RouteEpoch,
    SendAssign,
    SendUnassign,
    StoreState,
    WorkflowWithdrawn,
)
from tests.core.cluster import GIB, Cluster, SimulatedNode, make_need, make_node, make_workflow

_CONFIG = ManagerConfig(MembershipConfig(), PlacementConfig(workers_expected=1))
_NAMES = st.sampled_from(["node-1", "node-2", "node-3"])
_WORKFLOWS = st.sampled_from(
    [
        make_workflow("video", make_need("encode", 2), make_need("denoise", 9, instances=2)),
        make_workflow("stills", make_need("encode", 2), make_need("paint", 4)),
        make_workflow("huge", make_need("giant", 100)),
    ]
)


class ClusterModel(RuleBasedStateMachine):
    """Nodes come, die, drain, fail and are replaced; messages and managers are lost."""

    @initialize()
    def begin(self) -> None:
        """An empty set."""
        self.cluster = Cluster(_CONFIG)
        self.incarnations = 0
        self.homes: dict[int, tuple[str, str]] = {}
        self.stored_ids = 1

    def _check(self, effects: list[ManagerEffect]) -> None:
        """What must hold of effects: ids are stored before they are used, and used once."""
        for effect in effects:
            match effect:
                case StoreState(state):
                    assert state.next_actor_id >= self.stored_ids
                    self.stored_ids = state.next_actor_id
                case SendAssign(node_id, _, order):
                    assert order.actor_id < self.stored_ids, "an id is stored before it is given out"
                    home = (node_id, order.stage)
                    assert self.homes.setdefault(order.actor_id, home) == home, "an id is used once"
                    assert order.manager_epoch == self.cluster.stored.epoch

    def _healthy_ready(self) -> Mapping[int, str]:
        """Ready actors on nodes that are neither draining nor silent."""
        return {
            actor.actor_id: actor.stage
            for actor in self.cluster.manager.actors.values()
            if actor.life is ActorLife.READY and not self.cluster.nodes[actor.node_id].draining
        }

    @rule(name=_NAMES, gpu=st.booleans())
    def start_node(self, name: str, gpu: bool) -> None:
        """A process starts, perhaps in place of one that runs."""
        self.incarnations += 1
        gpus = (24,) if gpu else ()
        self._check(self.cluster.join(make_node(name, cpus=(16,), gpus=gpus, incarnation=self.incarnations)))

    @rule(name=_NAMES)
    def kill_node(self, name: str) -> None:
        """A process dies without a word, and its lease ends."""
        if self.cluster.nodes.pop(name, None) is not None:
            self._check(self.cluster.advance(6.0, beating=list(self.cluster.nodes)))

    @rule(name=_NAMES)
    def stop_node(self, name: str) -> None:
        """A process ends in order."""
        if name in self.cluster.nodes:
            self._check(self.cluster.leave(name))

    @rule(workflow=_WORKFLOWS)
    def offer(self, workflow: RegisteredWorkflow) -> None:
        """A workflow is registered; what runs for others is not touched."""
        before = self._healthy_ready()
        effects = self.cluster.offer(workflow)
        self._check(effects)
        stopped = {e.order.actor_id for e in effects if isinstance(e, SendUnassign)}
        assert not stopped & before.keys(), "what runs stays where it is"

    @rule(name=st.sampled_from(["video", "stills", "huge"]))
    def withdraw(self, name: str) -> None:
        """A workflow is no longer wanted."""
        self._check(self.cluster.tell(WorkflowWithdrawn(name)))

    @rule(name=_NAMES, draining=st.booleans())
    def drain(self, name: str, draining: bool) -> None:
        """A node drains, or takes it back."""
        if name in self.cluster.nodes:
            self.cluster.nodes[name].draining = draining
            self._check(self.cluster.beat(name))

    @rule(name=_NAMES)
    def load(self, name: str) -> None:
        """A node finishes loading."""
        if name in self.cluster.nodes:
            self._check(self.cluster.load(name))

    @rule(name=_NAMES, data=st.data())
    def fail(self, name: str, data: st.DataObject) -> None:
        """An actor fails."""
        node = self.cluster.nodes.get(name)
        if node is not None and node.actors:
            node.fail(data.draw(st.sampled_from(sorted(node.actors))), "boom")
            self._check(self.cluster.beat(name))

    @rule(orders=st.booleans(), routes=st.booleans())
    def lose(self, orders: bool, routes: bool) -> None:
        """Messages are lost from now on, or no longer."""
        self.cluster.loses_orders, self.cluster.loses_routes = orders, routes

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5]))
    def wait(self, seconds: float) -> None:
        """All live in peace for a while."""
        self._check(self.cluster.advance(seconds, beating=list(self.cluster.nodes)))

    @rule()
    def restart_manager(self) -> None:
        """The manager's process is replaced."""
        self.cluster.restart_manager()

    @invariant()
    def manager_knows_only_what_may_be(self) -> None:
        """Tables carry the stored epoch, and each actor in one is on a node in it."""
        table = self.cluster.manager.table
        assert table.epoch.manager == self.cluster.stored.epoch
        assert {actor.node_id for actor in table.actors} <= {node.node_id for node in table.nodes}

    def teardown(self) -> None:
        """Peace: nothing is lost, nodes are heard and load; then all is as it should be."""
        cluster = self.cluster
        cluster.loses_orders = cluster.loses_routes = False
        for _ in range(4):
            self._check(cluster.advance(4.0, beating=list(cluster.nodes)))
            self._check(cluster.load() if cluster.nodes else [])
        self._check(cluster.advance(4.0, beating=list(cluster.nodes)))
        if not cluster.nodes:
            return
        table = cluster.manager.table
        on_nodes = {(a.actor_id, a.stage) for node in cluster.nodes.values() for a in node.actors.values()}
        assert on_nodes == {(actor.actor_id, actor.stage) for actor in table.actors}
        assert {actor.state for actor in table.actors} <= {ActorState.READY, ActorState.DRAINING}
        assert all(node.routes == table.epoch for node in cluster.nodes.values())
        troubled = {problem.stage for problem in table.problems}
        for workflow in cluster.stored.workflows:
            for need in workflow.stages:
                ready = [a for a in table.actors if a.stage == need.stage and a.state is ActorState.READY]
                assert len(ready) == need.instances or need.stage in troubled, "served, or said why not"
        replayed = cluster.manager.story.replay()
        assert isinstance(replayed, ManagerMachine)
        assert replayed.table == table


ClusterModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestClusterModel = ClusterModel.TestCase


def test_memory_counts_until_an_actor_is_gone() -> None:
    """A device is not promised again while the actor that was told to stop still holds its memory."""
    cluster = Cluster(_CONFIG)
    cluster.offer(make_workflow("video", make_need("denoise", 20)))
    cluster.join(make_node("node-1", gpus=(24,)))
    cluster.load()
    node = cluster.nodes["node-1"]
    held = dict(node.actors)
    cluster.tell(WorkflowWithdrawn("video"))
    node.actors.update({n: evolve(report, state=ActorState.DRAINING) for n, report in held.items()})
    assert not _assigned(cluster.offer(make_workflow("stills", make_need("paint", 20))))
    assert not _assigned(cluster.beat())
    node.actors.clear()
    assert _assigned(cluster.beat()) == ["module:paint"]


def test_state_is_stored_before_what_relies_on_it() -> None:
    """A registration is confirmed, and an id given out, only behind the store."""
    cluster = Cluster(_CONFIG)
    kinds = [type(effect) for effect in cluster.offer(make_workflow("video", make_need("encode")))]
    assert kinds.index(StoreState) < kinds.index(ConfirmWorkflow)
    kinds = [type(effect) for effect in cluster.join(make_node("node-1"))]
    assert kinds.index(StoreState) < kinds.index(SendAssign)


def test_acknowledged_changes_outlive_the_manager() -> None:
    """After many changes and as many managers, each has all that the ones before acknowledged (fault 35)."""
    cluster = Cluster(_CONFIG)
    confirmed: set[str] = set()
    stored: set[str] = set()
    for n in range(20):
        for effect in cluster.offer(make_workflow(f"w{n:02}", make_need(f"s{n}"))):
            if isinstance(effect, StoreState):
                stored = {workflow.name for workflow in effect.state.workflows}
            elif isinstance(effect, ConfirmWorkflow):
                assert effect.name in stored, "it was said before it was stored"
                confirmed.add(effect.name)
        cluster.restart_manager()
    assert {workflow.name for workflow in cluster.stored.workflows} == confirmed
    assert len(confirmed) == 20
    assert {workflow.name for workflow in cluster.manager.state.workflows} == confirmed
    assert cluster.stored.epoch == 21


def test_demand_changes_the_number_of_actors() -> None:
    """Instances by demand are added without moving what runs, and the youngest are taken away again."""
    cluster = Cluster(_CONFIG)
    cluster.offer(make_workflow("video", make_need("encode", 1)))
    cluster.join(make_node("node-1"))
    cluster.load()
    assert _assigned(cluster.tell(DemandChanged({"module:encode": 3}))) == ["module:encode"] * 2
    cluster.load()
    effects = cluster.tell(DemandChanged({}))
    assert {e.order.actor_id for e in effects if isinstance(e, SendUnassign)} == {2, 3}


def test_surplus_is_taken_from_those_that_load() -> None:
    """If there are too many actors, one that is ready stays and one that still loads goes."""
    cluster = Cluster(_CONFIG)
    cluster.join(make_node("node-1"))
    cluster.join(make_node("node-2"))
    cluster.offer(make_workflow("video", make_need("encode", 1, instances=2)))
    cluster.load("node-2")
    (stop,) = (e for e in cluster.tell(DemandChanged({"module:encode": 1})) if isinstance(e, SendUnassign))
    assert (stop.node_id, stop.order.actor_id) == ("node-1", 1)


def test_failures_far_apart_are_not_counted_together() -> None:
    """A stage that serves well for a minute between its failures is never given up."""
    cluster = Cluster(_CONFIG)
    cluster.offer(make_workflow("video", make_need("encode", 1)))
    cluster.join(make_node("node-1"))
    for actor_id in range(1, 8):
        cluster.load()
        cluster.advance(61.0, beating=["node-1"])
        cluster.nodes["node-1"].fail(actor_id, "boom")
        cluster.beat()
        cluster.advance(1.5, beating=["node-1"])
    assert [actor.life for actor in cluster.manager.actors.values()] == [ActorLife.LOADING]


def test_other_resources_are_another_version() -> None:
    """The same schema with other resources is refused, and both are named: the digest knows no resources."""
    cluster = Cluster(_CONFIG)
    cluster.offer(make_workflow("video", make_need("encode", 1)))
    (refusal,) = cluster.offer(make_workflow("video", make_need("encode", 2)))
    assert isinstance(refusal, RefuseWorkflow)
    assert str(GIB) in refusal.reason
    assert str(2 * GIB) in refusal.reason


def test_workflows_are_bounded() -> None:
    """Beyond the bound a workflow is refused, with the bound named."""
    cluster = Cluster(evolve(_CONFIG, workflows_max=1))
    cluster.offer(make_workflow("video", make_need("encode")))
    (refusal,) = cluster.offer(make_workflow("stills", make_need("paint")))
    assert isinstance(refusal, RefuseWorkflow)
    assert not refusal.is_mismatch
    assert "bound" in refusal.reason


def test_actors_are_bounded() -> None:
    """A set at its bound of actors places no more, and says so instead of failing."""
    placement = PlacementConfig(actors_max=2)
    cluster = Cluster(ManagerConfig(placement=placement))
    cluster.offer(make_workflow("video", make_need("encode", 1, instances=3)))
    assert not _assigned(cluster.join(make_node("node-1")))
    assert "its bound is 2" in cluster.manager.table.waiting_for()[0]


def test_load_that_never_ends_is_a_failure() -> None:
    """An actor that loads for longer than the bound is stopped and tried again."""
    cluster = Cluster(ManagerConfig(placement=PlacementConfig(load_seconds_max=60.0)))
    cluster.offer(make_workflow("video", make_need("encode", 1)))
    cluster.join(make_node("node-1"))
    effects = cluster.advance(70.0, beating=["node-1"])
    assert _assigned(effects) == ["module:encode"]
    (stop,) = (effect for effect in effects if isinstance(effect, SendUnassign))
    assert "60 s" in stop.order.reason


def test_hour_long_load_does_not_touch_membership() -> None:
    """A node that is heard is a member, however long its models take to load (fault 37)."""
    cluster = Cluster(ManagerConfig(placement=PlacementConfig(load_seconds_max=7200.0)))
    cluster.offer(make_workflow("video", make_need("encode", 1)))
    cluster.join(make_node("node-1"))
    effects = cluster.advance(3600.0, beating=["node-1"])
    assert not effects
    assert cluster.manager.members["node-1"].state == "alive"


def test_another_nodes_actor_under_the_same_id_is_stopped() -> None:
    """Two nodes that report one id cannot both have it: the one it was not assigned to is told to stop."""
    cluster = Cluster(_CONFIG)
    cluster.offer(make_workflow("video", make_need("encode", 1)))
    cluster.join(make_node("node-1"))
    cluster.load()
    cluster.join(make_node("node-2"))
    cluster.nodes["node-2"].actors = dict(cluster.nodes["node-1"].actors)
    (stop,) = (effect for effect in cluster.beat("node-2") if isinstance(effect, SendUnassign))
    assert (stop.node_id, stop.order.actor_id) == ("node-2", 1)


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "module:other"},
        {"devices": ()},
        {"devices": ("cuda:9",)},
        {"digest": "unknown"},
        {"state": ActorState.FAILED},
        {"actor_id": 1 << 60},
    ],
    ids=str,
)
def test_what_does_not_fit_is_not_adopted(change: dict[str, Any]) -> None:
    """A new manager stops actors that it cannot account for, and is not disturbed by odd reports."""
    state = ManagerState(epoch=2, next_actor_id=66, workflows=(make_workflow("v", make_need("encode")),))
    manager = ManagerMachine(state=state)
    report = ActorReport(
        7,
        "module:encode",
        ("cpu:0",),
        ActorState.READY,
        digest="digest-of-v",
        address="tcp://node-1:1/actor/7",
    )
    node = SimulatedNode(make_node("node-1"), {7: evolve(report, **change)})
    effects = manager.handle(node.heartbeat(), 0.0)
    assert any(isinstance(effect, SendUnassign) for effect in effects)
    assert not manager.actors


def test_adoption_keeps_what_runs() -> None:
    """A ready actor of an earlier manager's life is served on, under its id."""
    state = ManagerState(epoch=2, next_actor_id=66, workflows=(make_workflow("v", make_need("encode")),))
    manager = ManagerMachine(state=state)
    report = ActorReport(7, "module:encode", ("cpu:0",), ActorState.READY, digest="digest-of-v")
    manager.handle(SimulatedNode(make_node("node-1"), {7: report}).heartbeat(), 0.0)
    assert manager.actors[7].life is ActorLife.READY


def test_absurd_epochs_are_not_believed() -> None:
    """A node that claims a table of an epoch beyond reason does not drive the manager's up."""
    manager = ManagerMachine(state=ManagerState(epoch=1))
    manager.handle(HeartbeatReceived(make_node("node-1"), routes=RouteEpoch(1 << 63, 0)), 0.0)
    assert manager.state.epoch == 1


def test_gpu_without_fallback_waits_for_a_gpu() -> None:
    """Where falling back is not allowed, a GPU stage waits and says for what."""
    cluster = Cluster(ManagerConfig(placement=PlacementConfig(allow_cpu_fallback=False)))
    cluster.offer(make_workflow("video", make_need("denoise"), make_need("mux", kind=DeviceKind.CPU)))
    assert _assigned(cluster.join(make_node("node-1"))) == ["module:mux"]
    assert "gpu device" in cluster.manager.table.waiting_for()[0]


def _assigned(effects: list[ManagerEffect]) -> list[str]:
    return [effect.order.stage for effect in effects if isinstance(effect, SendAssign)]
