"""A manager: whether it leads, and what the leader knows of the set and of placement."""

from collections.abc import Iterator

from onepiece import metrics_catalogue as catalogue
from onepiece.core.membership import NodeState
from onepiece.metrics import Sample
from onepiece.node.node_manager import ManagerService


def manager(service: ManagerService) -> Iterator[Sample]:
    """This manager; of the set only if it leads."""
    placement = service.placement()
    yield catalogue.MANAGER_LEADS.of(placement is not None)
    if placement is None:
        return
    states = service.node_states()
    for state in NodeState:
        if state is NodeState.DEAD:
            continue  # how many are remembered says nothing
        yield catalogue.SET_NODES.of(list(states.values()).count(state), state.value)
    for node, seconds in service.heartbeat_ages().items():
        if states.get(node, NodeState.DEAD) is not NodeState.DEAD:
            yield catalogue.SET_HEARD.of(seconds, node)
    for stage in placement.stages:
        counted = {
            "wanted": stage.wanted,
            "ready": stage.ready,
            "loading": stage.loading,
            "leaving": stage.leaving,
        }
        for state_name, count in counted.items():
            yield catalogue.PLACEMENT_INSTANCES.of(count, stage.stage, state_name)
        if stage.utilisation is not None:
            yield catalogue.PLACEMENT_UTILISATION.of(stage.utilisation, stage.stage)
        yield catalogue.PLACEMENT_PROBLEMS.of(stage.problem is not None, stage.stage)
    yield catalogue.MOVES.of(placement.done, "done")
    yield catalogue.MOVES.of(placement.given_back, "given_back")
    yield catalogue.MOVES.of(placement.abandoned, "abandoned")
