"""Scenario files: commands to a simulated cluster, and what the NodeManager makes of each.

::

    # A comment.
    join node-1 cpu=8 gpu=24,24
    ----
    node-1 incarnation 1 joined
    assign 1 module:denoise to node-1 cuda:0

    next command
    ----
    ...

The part below ``----`` is written by ``pytest tests/core --rewrite-scenarios`` and reviewed as a
diff. Commands (all times in seconds):

=============================================== ====================================================
``config workers_expected=2 ...``               new manager; any field of the two configs
``offer NAME [STAGE=GiB[xN][@kind]]... [...]``  a workflow; ``digest=D``, ``replaces``
``withdraw NAME``                               no longer wanted
``join NODE [cpu=GiB,..] [gpu=GiB,..]``         a node is heard first; ``incarnation=N``, ``roles=a,b``,
                                                ``digest=D`` (of what it imports)
``beat [NODE...]``                              heartbeats, as the nodes are
``load [NODE...]``                              loading ends, then heartbeats
``fail NODE ACTOR MESSAGE``                     an actor failed, then a heartbeat
``drain NODE`` / ``resume NODE``                the node says so in a heartbeat
``forget NODE``                                 the node's process loses its actors, then a heartbeat
``leave NODE``                                  good-bye
``advance SECONDS [NODE...]``                   time passes; the nodes named are heard
``stall SECONDS``                               time passes without the manager being called, then a tick
``lose [orders] [routes]``                      these messages are lost from now on; none: all arrive
``restart``                                     a new manager with what is stored
``forget-state``                                a new manager with nothing
``show``                                        the route table
=============================================== ====================================================
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
from attrs import define, evolve, field, frozen

from onepiece.core import (
    ActorFailed,
    ConfirmWorkflow,
    DeviceKind,
    Expel,
    ManagerConfig,
    ManagerEffect,
    ManagerStalled,
    ManagerState,
    MembershipConfig,
    NodeDied,
    NodeDrained,
    NodeEmptied,
    NodeJoined,
    NodeRecovered,
    NodeResumed,
    NodeSuspected,
    PlacementConfig,
    PublishRoutes,
    RefuseWorkflow,
    RouteTable,
    SendAssign,
    SendRoutes,
    SendUnassign,
    StageNeed,
    StoreState,
    Tick,
    WorkflowWithdrawn,
)
from tests.core.cluster import Cluster, make_need, make_node, make_workflow

_RULE = "----"


@frozen
class Block:
    """One command with the comments above it and the outcome below it."""

    comments: tuple[str, ...]
    command: str
    outcome: str


def parse(text: str) -> list[Block]:
    """The blocks of a scenario file."""
    blocks: list[Block] = []
    for part in text.strip().split("\n\n"):
        above, _, below = part.partition(f"\n{_RULE}")
        lines = above.splitlines()
        comments = tuple(line for line in lines if line.startswith("#"))
        (command,) = (line for line in lines if not line.startswith("#"))
        blocks.append(Block(comments, command, below.strip("\n")))
    return blocks


def render(blocks: list[Block]) -> str:
    """The file of these blocks."""
    parts = ["\n".join([*b.comments, b.command, _RULE, *([b.outcome] if b.outcome else [])]) for b in blocks]
    return "\n\n".join(parts) + "\n"


def play(path: Path) -> list[Block]:
    """Carry out the commands of a file; the same blocks with what really came out."""
    player = _Player()
    return [evolve(block, outcome=player.run(block.command)) for block in parse(path.read_text())]


@define(eq=False)
class _Player:
    cluster: Cluster = field(factory=Cluster)

    def run(self, command: str) -> str:
        name, *words = command.split()
        handler: Callable[[list[str]], list[ManagerEffect] | str] = getattr(
            self, f"_do_{name.replace('-', '_')}"
        )
        outcome = handler(words)
        return (
            outcome if isinstance(outcome, str) else "\n".join(line for e in outcome for line in describe(e))
        )

    def _do_config(self, words: list[str]) -> str:
        given = _options(words)
        parts = []
        for kind in (MembershipConfig, PlacementConfig):
            names = {each.name: each.type for each in attrs.fields(kind)}
            chosen = {name: given.pop(name) for name in list(given) if name in names}
            parts.append(kind(**{n: _number(v) for n, v in chosen.items()}))  # type: ignore[arg-type]  # names are checked
        assert not given, f"unknown settings {sorted(given)}"
        membership, placement = parts
        assert isinstance(membership, MembershipConfig)
        assert isinstance(placement, PlacementConfig)
        self.cluster = Cluster(ManagerConfig(membership, placement))
        return ""

    def _do_offer(self, words: list[str]) -> list[ManagerEffect]:
        name, *rest = words
        options = _options(rest)
        digest = options.pop("digest", None)
        replaces = options.pop("replaces", None) is not None
        needs = [_need(stage, size) for stage, size in options.items()]
        return self.cluster.offer(make_workflow(name, *needs, digest=digest), replaces=replaces)

    def _do_withdraw(self, words: list[str]) -> list[ManagerEffect]:
        return self.cluster.tell(WorkflowWithdrawn(words[0]))

    def _do_join(self, words: list[str]) -> list[ManagerEffect]:
        node_id, *rest = words
        options = _options(rest)
        info = make_node(
            node_id,
            cpus=_sizes(options.get("cpu", "")),
            gpus=_sizes(options.get("gpu", "")),
            incarnation=int(options.get("incarnation", "1")),
            roles=tuple(options.get("roles", "worker").split(",")),
        )
        return self.cluster.join(info, digest=options.get("digest"))

    def _do_beat(self, words: list[str]) -> list[ManagerEffect]:
        return self.cluster.beat(*words)

    def _do_load(self, words: list[str]) -> list[ManagerEffect]:
        return self.cluster.load(*words)

    def _do_fail(self, words: list[str]) -> list[ManagerEffect]:
        node_id, actor_id, *message = words
        self.cluster.nodes[node_id].fail(int(actor_id), " ".join(message))
        return self.cluster.beat(node_id)

    def _do_drain(self, words: list[str]) -> list[ManagerEffect]:
        self.cluster.nodes[words[0]].draining = True
        return self.cluster.beat(words[0])

    def _do_resume(self, words: list[str]) -> list[ManagerEffect]:
        self.cluster.nodes[words[0]].draining = False
        return self.cluster.beat(words[0])

    def _do_forget(self, words: list[str]) -> list[ManagerEffect]:
        self.cluster.nodes[words[0]].actors.clear()
        return self.cluster.beat(words[0])

    def _do_leave(self, words: list[str]) -> list[ManagerEffect]:
        return self.cluster.leave(words[0])

    def _do_advance(self, words: list[str]) -> list[ManagerEffect]:
        return self.cluster.advance(float(words[0]), beating=words[1:])

    def _do_stall(self, words: list[str]) -> list[ManagerEffect]:
        self.cluster.now += float(words[0])
        return self.cluster.tell(Tick())

    def _do_lose(self, words: list[str]) -> str:
        self.cluster.loses_orders = "orders" in words
        self.cluster.loses_routes = "routes" in words
        return ""

    def _do_restart(self, words: list[str]) -> str:
        self.cluster.restart_manager()
        return f"epoch {self.cluster.stored.epoch}, ids from {self.cluster.stored.next_actor_id}"

    def _do_forget_state(self, words: list[str]) -> str:
        self.cluster.stored = ManagerState()
        return self._do_restart(words)

    def _do_show(self, words: list[str]) -> str:
        return "\n".join(_table_lines(self.cluster.manager.table))


def describe(effect: ManagerEffect) -> Iterator[str]:
    """An effect as scenario files show it."""
    match effect:
        case StoreState(state):
            names = ", ".join(workflow.name for workflow in state.workflows) or "none"
            yield f"store epoch {state.epoch}, ids below {state.next_actor_id}, workflows: {names}"
        case ConfirmWorkflow(name, digest):
            yield f"confirm {name} ({digest})"
        case RefuseWorkflow(name, digest, reason):
            yield f"refuse {name} ({digest}): {_one_line(reason)}"
        case PublishRoutes(table):
            yield f"publish {_epoch(table)}"
        case SendRoutes(node_id, _, table):
            yield f"send routes {_epoch(table)} to {node_id}"
        case SendAssign(node_id, _, order):
            yield f"assign {order.actor_id} {order.stage} to {node_id} {', '.join(order.devices)}"
        case SendUnassign(node_id, _, stop):
            yield f"unassign {stop.actor_id} at {node_id}: {_one_line(stop.reason)}"
        case Expel(node_id, incarnation, reason, may_rejoin):
            then = "may rejoin" if may_rejoin else "must stop"
            yield f"expel {node_id} incarnation {incarnation}, {then}: {reason}"
        case ActorFailed(actor_id, stage, node_id, reason):
            yield f"actor {actor_id} {stage} failed on {node_id}: {_one_line(reason)}"
        case _:
            yield _describe_notice(effect)


def _describe_notice(effect: ManagerEffect) -> str:
    match effect:
        case NodeJoined(node):
            return f"{node.node_id} incarnation {node.incarnation} joined"
        case NodeDied(node_id, incarnation, reason):
            return f"{node_id} incarnation {incarnation} died: {reason}"
        case NodeSuspected(node_id, _, silent_seconds):
            return f"{node_id} suspected, silent for {silent_seconds:.1f}"
        case NodeRecovered(node_id):
            return f"{node_id} recovered"
        case NodeDrained(node_id):
            return f"{node_id} drains"
        case NodeEmptied(node_id):
            return f"{node_id} has drained"
        case NodeResumed(node_id):
            return f"{node_id} resumed"
        case ManagerStalled(seconds):
            return f"manager stalled for {seconds:.1f}"
        case _:
            raise AssertionError(effect)


def _table_lines(table: RouteTable) -> Iterator[str]:
    yield f"routes {_epoch(table)}"
    for node in table.nodes:
        yield f"  {node.node_id} incarnation {node.incarnation} {node.state}"
    for actor in table.actors:
        where = f"{actor.node_id} {', '.join(actor.devices)}"
        yield f"  actor {actor.actor_id} {actor.stage} on {where}: {actor.state}"
    for problem in table.problems:
        yield f"  problem {problem.stage}: {_one_line(problem.message)}"
    for waiting in table.waiting_for():
        yield f"  waiting for {_one_line(waiting)}"


def _epoch(table: RouteTable) -> str:
    return f"{table.epoch.manager}.{table.epoch.counter}"


def _one_line(text: str) -> str:
    return " / ".join(text.splitlines())


def _options(words: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _number(text: str) -> float | int:
    return float(text) if "." in text else int(text)


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def _need(stage: str, size: str) -> StageNeed:
    size, _, kind = size.partition("@")
    gib, _, instances = size.partition("x")
    return make_need(stage, int(gib), instances=int(instances or 1), kind=DeviceKind(kind or "gpu"))
