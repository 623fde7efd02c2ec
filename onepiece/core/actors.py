"""The life of one stage actor, from the order to run it until its node no longer has it.

::

                 sent             reported            reported
      (chosen) -------> assigned ---------> loading ---------> ready <------> retiring
                            |                  |   <---------    |   drain       |
                            |                  |   reloads       |               |
                            +------------------+-----------------+---------------+
                                               | failed, surplus, replaced
                                               v
                                            stopping -----> (gone) no longer reported, or node died

An actor *serves* from its assignment on: it counts towards the instances that are wanted. One that
*retires* still takes work where no other is ready, and is stopped when its replacement is ready.
One that is *stopping* has been told so; its memory stays counted until its node no longer reports it.

Orders (``Assign``, ``Unassign``) are idempotent by ``actor_id``, and an id is never used twice: a
new try is a new actor.
"""

import enum
from collections.abc import Mapping
from typing import Final, Self

from attrs import evolve, frozen

from onepiece.core.inventory import ActorReport, ActorState, NodeInfo, RegisteredWorkflow
from onepiece.core.machine import follow


class ActorLife(enum.StrEnum):
    """Where an actor is in its life, as the NodeManager sees it."""

    ASSIGNED = "assigned"
    LOADING = "loading"
    READY = "ready"
    RETIRING = "retiring"
    STOPPING = "stopping"


class ActorTrigger(enum.Enum):
    """What moves an actor on."""

    REPORTED_LOADING = "reported loading"
    REPORTED_READY = "reported ready"
    RETIRED = "retired"
    RESUMED = "resumed"
    STOPPED = "stopped"


TRANSITIONS: Final[Mapping[tuple[ActorLife, ActorTrigger], ActorLife]] = {
    (ActorLife.ASSIGNED, ActorTrigger.REPORTED_LOADING): ActorLife.LOADING,
    (ActorLife.ASSIGNED, ActorTrigger.REPORTED_READY): ActorLife.READY,
    (ActorLife.ASSIGNED, ActorTrigger.STOPPED): ActorLife.STOPPING,
    (ActorLife.LOADING, ActorTrigger.REPORTED_LOADING): ActorLife.LOADING,
    (ActorLife.LOADING, ActorTrigger.REPORTED_READY): ActorLife.READY,
    (ActorLife.LOADING, ActorTrigger.STOPPED): ActorLife.STOPPING,
    (ActorLife.READY, ActorTrigger.REPORTED_LOADING): ActorLife.LOADING,
    (ActorLife.READY, ActorTrigger.REPORTED_READY): ActorLife.READY,
    (ActorLife.READY, ActorTrigger.RETIRED): ActorLife.RETIRING,
    (ActorLife.READY, ActorTrigger.STOPPED): ActorLife.STOPPING,
    (ActorLife.RETIRING, ActorTrigger.REPORTED_LOADING): ActorLife.RETIRING,
    (ActorLife.RETIRING, ActorTrigger.REPORTED_READY): ActorLife.RETIRING,
    (ActorLife.RETIRING, ActorTrigger.RESUMED): ActorLife.READY,
    (ActorLife.RETIRING, ActorTrigger.STOPPED): ActorLife.STOPPING,
}
"""A stopping actor moves no more; it is gone when it is no longer reported, or when its node died."""

_SERVING: Final = frozenset({ActorLife.ASSIGNED, ActorLife.LOADING, ActorLife.READY})


@frozen
class Assign:
    """Order to a node: run this actor.

    The node imports ``module`` (``module:attribute``, the workflow), compares the digest, and loads
    the stage of this key on the devices. An order whose ``manager_epoch`` is below the highest that
    the node has seen is from a manager that no longer leads, and is ignored.
    """

    actor_id: int
    stage: str
    workflow: str
    module: str
    digest: str
    devices: tuple[str, ...]
    memory_bytes: int
    manager_epoch: int


@frozen
class Unassign:
    """Order to a node: drain this actor and end it; no error if there is none."""

    actor_id: int
    reason: str
    manager_epoch: int


@frozen
class Actor:
    """What the NodeManager knows of one actor."""

    actor_id: int
    stage: str
    workflow: str
    """The workflow it was assigned from; others may share it."""
    digest: str
    """Of that workflow then."""
    node_id: str
    incarnation: int
    devices: tuple[str, ...]
    memory_bytes: int
    """On each of the devices."""
    life: ActorLife
    ordered_at: float
    """When the last order about it was sent."""
    sends: int = 1
    """How often the order to run it was sent."""
    was_reported: bool = False
    loads_since: float | None = None
    ready_since: float | None = None
    address: str = ""
    error: str | None = None
    """Why it failed; it is stopping then."""
    stop_reason: str = ""

    @classmethod
    def adopted(
        cls, report: ActorReport, workflow: str, node: NodeInfo, memory_bytes: int, now: float
    ) -> Self:
        """An actor that an earlier manager placed, as its node reports it."""
        is_ready = report.state is ActorState.READY
        return cls(
            actor_id=report.actor_id,
            stage=report.stage,
            workflow=workflow,
            digest=report.digest,
            node_id=node.node_id,
            incarnation=node.incarnation,
            devices=report.devices,
            memory_bytes=memory_bytes,
            life=ActorLife.READY if is_ready else ActorLife.LOADING,
            ordered_at=now,
            was_reported=True,
            loads_since=None if is_ready else now,
            ready_since=now if is_ready else None,
            address=report.address,
        )

    @property
    def serves(self) -> bool:
        """It counts towards the instances wanted."""
        return self.life in _SERVING

    @property
    def shown_state(self) -> ActorState:
        """Its state in routes."""
        if self.error is not None:
            return ActorState.FAILED
        match self.life:
            case ActorLife.ASSIGNED | ActorLife.LOADING:
                return ActorState.LOADING
            case ActorLife.READY:
                return ActorState.READY
            case ActorLife.RETIRING | ActorLife.STOPPING:
                return ActorState.DRAINING

    def moved(self, trigger: ActorTrigger, now: float) -> Self:
        """The actor after ``trigger``; raises ``InvalidTransition`` if it cannot happen now."""
        life = follow(TRANSITIONS, self.life, trigger)
        if life is self.life:
            return self
        loads_since = now if life is ActorLife.LOADING else None
        ready_since = self.ready_since
        if trigger is ActorTrigger.REPORTED_READY:
            ready_since = now
        return evolve(self, life=life, loads_since=loads_since, ready_since=ready_since)


def describe_mismatch(actor: Actor, report: ActorReport, registered: RegisteredWorkflow | None) -> str:
    """That a node has imported another version of the workflow than is registered; both are named."""
    schema = registered.schema_text if registered is not None else "(withdrawn since)"
    return (
        f"{actor.node_id} has another version of the workflow than is registered; install the same on "
        f"all nodes. On {actor.node_id}, digest {report.digest}:\n{report.schema_text}\n"
        f"Registered, digest {actor.digest}:\n{schema}"
    )
