"""Routes: who runs which stage, as one immutable table with an epoch.

The leading NodeManager publishes a table whenever something in it has changed; each node keeps the
newest it has seen and decides by it alone, so that the data path goes on while nobody leads. An
*epoch* is the pair (manager epoch, counter): a later manager's table beats all of an earlier one's.

Two ways to choose among the actors of a stage:

* ``pick`` for a message that may go anywhere: the fewest outstanding messages as the sender counts
  them, among equals the one that it picked longest ago;
* ``meeting_point`` for the inputs of a join, which come from different nodes and must meet at one
  actor: rendezvous hashing of the UID, which needs no agreement but on the table. When an actor
  disappears only the UIDs that met there move.

An actor that drains is used only where no other is ready; it is still in the table so that what
arrives late can be taken in or passed on. An actor on a suspect node counts as ready for meeting
points (suspicion mostly passes, and each change makes inputs meet at the wrong place), but is
picked last.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Final, TypeVar

import xxhash
from attrs import evolve, frozen

from onepiece.core.inventory import ActorState, Device

SUSPECT: Final = "suspect"


def life_of(node_id: str, incarnation: int) -> str:
    """One life of a node: what it says and holds is not confused with what it did in another."""
    return f"{node_id}.{incarnation}"


@frozen(order=True)
class RouteEpoch:
    """Which table is newer."""

    manager: int
    counter: int

    def next(self) -> "RouteEpoch":
        """The epoch of the same manager's next table."""
        return RouteEpoch(self.manager, self.counter + 1)


@frozen
class NodeRoute:
    """A living node: where it listens, and what it is."""

    node_id: str
    incarnation: int
    address: str
    http: str | None
    roles: tuple[str, ...]
    state: str
    """``alive``, ``suspect`` or ``draining``."""
    devices: tuple[Device, ...]
    process_id: int

    @property
    def life(self) -> str:
        """This life of the node."""
        return life_of(self.node_id, self.incarnation)


@frozen
class ActorRoute:
    """One stage actor: where it is, and whether it takes work.

    ``address`` is its inbox's, "" until its node has reported it. An actor is identified by
    ``actor_id`` alone: ids are never used twice.
    """

    actor_id: int
    stage: str
    node_id: str
    incarnation: int
    devices: tuple[str, ...]
    address: str
    state: ActorState
    error: str | None = None

    @property
    def life(self) -> str:
        """The life of the node it is on."""
        return life_of(self.node_id, self.incarnation)


@frozen
class WorkflowRoute:
    """A registered workflow: which stages must be ready for it."""

    name: str
    module: str
    digest: str
    stages: tuple[str, ...]


@frozen
class Problem:
    """Why a stage is not served as it should be, in words for operator and user."""

    stage: str
    message: str


@frozen
class RouteTable:
    """All routes at one epoch; see the module's text."""

    epoch: RouteEpoch
    nodes: tuple[NodeRoute, ...] = ()
    actors: tuple[ActorRoute, ...] = ()
    workflows: tuple[WorkflowRoute, ...] = ()
    problems: tuple[Problem, ...] = ()

    def is_newer_than(self, other: "RouteTable | None") -> bool:
        """Whether this table replaces ``other``."""
        return other is None or self.epoch > other.epoch

    @cached_property
    def _actors_by_id(self) -> Mapping[int, ActorRoute]:
        return {actor.actor_id: actor for actor in self.actors}

    @cached_property
    def _nodes_by_id(self) -> Mapping[str, NodeRoute]:
        return {node.node_id: node for node in self.nodes}

    @cached_property
    def _workflows_by_name(self) -> Mapping[str, WorkflowRoute]:
        return {workflow.name: workflow for workflow in self.workflows}

    @cached_property
    def _actors_by_stage(self) -> Mapping[str, tuple[ActorRoute, ...]]:
        ready: dict[str, list[ActorRoute]] = {}
        draining: dict[str, list[ActorRoute]] = {}
        for actor in self.actors:
            if actor.state is ActorState.READY:
                ready.setdefault(actor.stage, []).append(actor)
            elif actor.state is ActorState.DRAINING and actor.address:
                draining.setdefault(actor.stage, []).append(actor)
        return {stage: tuple(actors) for stage, actors in (draining | ready).items()}

    @cached_property
    def _trusted_by_stage(self) -> Mapping[str, tuple[ActorRoute, ...]]:
        return {
            stage: tuple(actor for actor in actors if not self._is_suspect(actor))
            for stage, actors in self._actors_by_stage.items()
        }

    def node(self, node_id: str) -> NodeRoute | None:
        """The living node of this id."""
        return self._nodes_by_id.get(node_id)

    def actor(self, actor_id: int) -> ActorRoute | None:
        """The actor of this id, in whatever state."""
        return self._actors_by_id.get(actor_id)

    def workflow(self, name: str) -> WorkflowRoute | None:
        """The registered workflow of this name."""
        return self._workflows_by_name.get(name)

    def actors_for(self, stage: str) -> tuple[ActorRoute, ...]:
        """The actors that take work of ``stage``: ready ones, or else those that drain."""
        return self._actors_by_stage.get(stage, ())

    def pick(
        self, stage: str, outstanding: Mapping[int, int], picked: Mapping[int, int], first: int
    ) -> ActorRoute | None:
        """An actor for a message that may go to any.

        What was sent longest ago is likely to be done soonest, so that is where the next one goes of equals.
        Senders that know nothing yet begin at different actors: else all would begin with the same one.

        Args:
            stage: The key of the stage.
            outstanding: How many messages this sender has under way, by actor id; absent means 0.
            picked: A number that grows with each pick, at the actor's latest one; absent means never.
            first: Any number of the sender's own: where it begins among those that it never picked.

        Returns:
            The actor with the fewest outstanding messages, or None if no actor takes work.
        """
        candidates = self.actors_for(stage)
        if len(candidates) == 1:  # the most frequent case
            return candidates[0]
        usable = self._trusted_by_stage.get(stage) or candidates
        if not usable:
            return None
        begin = first % len(usable)

        def burden(actor: ActorRoute) -> tuple[int, int]:
            return outstanding.get(actor.actor_id, 0), picked.get(actor.actor_id, 0)

        return min((*usable[begin:], *usable[:begin]), key=burden)

    def meeting_point(self, stage: str, uid: str) -> ActorRoute | None:
        """The actor at which all inputs of ``uid`` for a join meet; None if no actor takes work."""
        candidates = self.actors_for(stage)
        if not candidates:
            return None
        by_name = {str(actor.actor_id): actor for actor in candidates}
        return by_name[rendezvous(uid, by_name)]

    def waiting_for(self, workflow: str | None = None) -> tuple[str, ...]:
        """What is missing until the workflow (or all of them) can be served, in words; () if nothing."""
        chosen = [w for w in self.workflows if workflow is None or w.name == workflow]
        return tuple(
            self._missing(route, stage)
            for route in chosen
            for stage in route.stages
            if not self.actors_for(stage)
        )

    def _is_suspect(self, actor: ActorRoute) -> bool:
        node = self._nodes_by_id.get(actor.node_id)
        return node is None or node.state == SUSPECT

    def _missing(self, workflow: WorkflowRoute, stage: str) -> str:
        label = f"{workflow.name}/{stage.rpartition(':')[2]}"
        problems = [problem.message for problem in self.problems if problem.stage == stage]
        if problems:
            return f"{label}: {'; '.join(problems)}"
        loading = {
            actor.node_id
            for actor in self.actors
            if actor.stage == stage and actor.state is ActorState.LOADING
        }
        if loading:
            return f"{label} is loading on {', '.join(sorted(loading))}"
        return f"{label} is not placed yet"


def rendezvous(uid: str, candidates: Iterable[str]) -> str:
    """The candidate with the highest hash together with ``uid``; all have equal weight.

    Raises:
        ValueError: There is no candidate.
    """
    return max(candidates, key=lambda name: _weight(uid, name))


def ranked(uid: str, candidates: Iterable[str]) -> list[str]:
    """The candidates from the one that ``rendezvous`` picks down; what is missing leaves no other trace."""
    return sorted(candidates, key=lambda name: _weight(uid, name), reverse=True)


def first_of(node_id: str) -> int:
    """A number of a node's own, for ``RouteTable.pick``."""
    return xxhash.xxh3_64_intdigest(node_id.encode())


def _weight(uid: str, name: str) -> tuple[int, str]:
    return xxhash.xxh3_64_intdigest(f"{uid}\0{name}".encode()), name


@frozen
class RouteChanges:
    """What is different in a newer table."""

    nodes_joined: tuple[NodeRoute, ...]
    nodes_gone: tuple[NodeRoute, ...]
    """Old routes of nodes (or incarnations) that are no longer there."""
    actors_added: tuple[ActorRoute, ...]
    actors_gone: tuple[ActorRoute, ...]
    actors_changed: tuple[tuple[ActorRoute, ActorRoute], ...]
    """Old and new route of actors that are in both tables and differ."""
    workflows_added: tuple[WorkflowRoute, ...]
    """New, or registered with another digest."""
    workflows_gone: tuple[WorkflowRoute, ...]


def diff(old: RouteTable | None, new: RouteTable) -> RouteChanges:
    """What changed from ``old`` (None: nothing was known) to ``new``."""
    old = old or RouteTable(RouteEpoch(0, 0))
    old_nodes = {(node.node_id, node.incarnation): node for node in old.nodes}
    new_nodes = {(node.node_id, node.incarnation): node for node in new.nodes}
    old_actors = {actor.actor_id: actor for actor in old.actors}
    new_actors = {actor.actor_id: actor for actor in new.actors}
    old_workflows = {(workflow.name, workflow.digest): workflow for workflow in old.workflows}
    new_workflows = {(workflow.name, workflow.digest): workflow for workflow in new.workflows}
    return RouteChanges(
        nodes_joined=_only_in(new_nodes, old_nodes),
        nodes_gone=_only_in(old_nodes, new_nodes),
        actors_added=_only_in(new_actors, old_actors),
        actors_gone=_only_in(old_actors, new_actors),
        actors_changed=tuple(
            (old_actors[key], actor)
            for key, actor in new_actors.items()
            if key in old_actors and old_actors[key] != actor
        ),
        workflows_added=_only_in(new_workflows, old_workflows),
        workflows_gone=_only_in(old_workflows, new_workflows),
    )


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def _only_in(these: Mapping[_Key, _Value], not_those: Mapping[_Key, _Value]) -> tuple[_Value, ...]:
    return tuple(value for key, value in these.items() if key not in not_those)


def next_table(old: RouteTable, wanted: RouteTable) -> RouteTable:
    """The table to publish after ``old`` so that ``wanted`` holds; ``old`` itself if nothing changed.

    Routes that did not change are the same objects in both, so that many tables take little memory.
    """
    shared = evolve(
        wanted,
        epoch=old.epoch,
        nodes=_shared(old.nodes, wanted.nodes),
        actors=_shared(old.actors, wanted.actors),
        workflows=_shared(old.workflows, wanted.workflows),
    )
    return old if shared == old else evolve(shared, epoch=old.epoch.next())


def _shared(old: tuple[_Value, ...], wanted: tuple[_Value, ...]) -> tuple[_Value, ...]:
    known = {value: value for value in old}
    return tuple(known.get(value, value) for value in wanted)
