"""A set under a load, on virtual time: simulated nodes whose actors report what follows from it."""

from random import Random

from attrs import define, evolve, field

from onepiece.core import HeartbeatReceived, ManagerConfig, MembershipConfig, PlacementConfig
from onepiece.core.balance import BalanceConfig, RebalanceMode, patience
from onepiece.core.inventory import ActorState
from onepiece.core.move_board import StageLimits
from onepiece.core.placement_view import PlacementView
from tests.core.cluster import Cluster, make_need, make_node, make_workflow

STEP = 5.0
"""Between two heartbeats: an hour should not take long."""
SECONDS = 0.5
"""Of a run of either stage."""
RED, BLUE = "module:red", "module:blue"


@define(eq=False)
class LoadedSet:
    """A set of single-GPU nodes under a load; what its actors report follows from that."""

    red: int = 3
    blue: int = 3
    memory_gib: int = 30
    mode: RebalanceMode = RebalanceMode.ON
    limits: dict[str, StageLimits] = field(factory=dict)
    cluster: Cluster = field(init=False)
    offered: dict[tuple[str, str], int] = field(factory=dict)
    rates: dict[str, float] = field(factory=dict)
    random: Random = field(factory=lambda: Random(7))
    moved: list[str] = field(factory=list)
    loads_by_itself: bool = True
    size_class: str = ""
    """Of the blue requests that come now."""
    class_seconds: dict[str, float] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        gpus = self.red + self.blue
        placement = PlacementConfig(
            workers_expected=gpus, limits=self.limits, adoption_seconds=STEP, resend_seconds=STEP
        )
        balance = BalanceConfig(mode=self.mode, look_seconds=10.0, policy=patience(60.0))
        membership = MembershipConfig(
            heartbeat_seconds=STEP / 2, suspect_seconds=2 * STEP, lease_seconds=4 * STEP
        )
        self.cluster = Cluster(ManagerConfig(membership, placement, balance))
        for name, instances in (("red", self.red), ("blue", self.blue)):
            need = make_need(name, self.memory_gib, instances=instances)
            self.cluster.offer(make_workflow(name, need))
        self.cluster.join(make_node("p", roles=("proxy",)))
        for number in range(gpus):
            self.cluster.join(make_node(f"n{number}", cpus=(), gpus=(80,)))
        self.cluster.load()

    def run(self, seconds: float) -> None:
        """Let time pass under the load."""
        for _ in range(round(seconds / STEP)):
            self.step()

    def step(self) -> None:
        """Requests arrive by chance, ready actors serve them, everybody is heard."""
        cluster = self.cluster
        for name, rate in self.rates.items():
            size_class = self.size_class if name == "blue" else ""
            kind, came = (name, size_class), _poisson(self.random, rate * STEP)
            self.offered[kind] = self.offered.get(kind, 0) + came
            seconds = self.class_seconds.get(size_class, SECONDS)
            ready = [
                (node, report)
                for node in cluster.nodes.values()
                for report in node.actors.values()
                if report.stage == f"module:{name}" and report.state is ActorState.READY
            ]
            for node, report in ready:
                work = evolve(report.work, load_seconds=20.0)
                for _ in range(max(1, round(min(rate / len(ready), 1 / seconds) * STEP))):
                    work = work.with_run(seconds, size_class=size_class)
                node.actors[report.actor_id] = evolve(report, work=work)
        before = self.view().done
        cluster.advance(STEP)
        self.beat()
        self.moved += ["move"] * (self.view().done - before)
        if self.loads_by_itself:
            for node in cluster.nodes.values():
                node.finish_loading()

    def beat(self) -> None:
        """All are heard."""
        for name, node in self.cluster.nodes.items():
            heard: HeartbeatReceived = node.heartbeat()
            self.cluster.tell(evolve(heard, offered=self._by_class()) if name == "p" else heard)

    def _by_class(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (name, size_class), count in self.offered.items():
            found.setdefault(name, {})[size_class] = count
        return found

    def view(self) -> PlacementView:
        """What is shown."""
        return self.cluster.manager.view(self.cluster.now)

    def ready(self) -> tuple[int, int]:
        """Ready instances of both stages."""
        stages = {stage.stage: stage.ready for stage in self.view().stages}
        return stages[RED], stages[BLUE]


def _poisson(random: Random, rate: float) -> int:
    count, left = 0, 1.0
    while (left := left - random.expovariate(rate) if rate else -1.0) > 0:
        count += 1
    return count
