"""The edges that begin at a node: what carries them, what is retained for them, what was sent again."""

from collections.abc import Collection, Iterable, Iterator
from typing import Final

from attrs import frozen

from onepiece import metrics_catalogue as catalogue
from onepiece.core.retention import Place
from onepiece.graph import INPUTS, WorkflowGraph
from onepiece.messages import STORE, STORE_REGION
from onepiece.metrics import Sample
from onepiece.node.readings.channels import wire_of
from onepiece.runtime.counts import RESEND_REASONS
from onepiece.runtime.environment import Environment


@frozen
class Edge:
    """From a stage, or ``@inputs``, to the next one, or ``@store``."""

    stage: str
    next_stage: str
    is_retained: bool


def edges_from(graphs: Iterable[WorkflowGraph], stages: Collection[str]) -> set[Edge]:
    """The edges of all workflows that begin at one of these."""
    found: set[Edge] = set()
    for graph in graphs:
        found |= {Edge(INPUTS, graph.node(each).stage, is_retained=False) for each in graph.entry_nodes}
        for node in graph.nodes:
            found |= {Edge(node.stage, use.node.stage, use.is_retained) for use in graph.uses(node.id)}
        output = graph.output
        found.add(Edge(graph.node(output.node).stage, STORE, output.is_retained))
    return {edge for edge in found if edge.stage in stages}


def edges(env: Environment, stages: Collection[str]) -> Iterator[Sample]:
    """What carries each edge that begins at one of these stages."""
    addresses = _addresses(env)
    links = {link.address: link for link in env.outbox.links() if link.wire is not None}
    ends = {(edge.stage, edge.next_stage) for edge in edges_from(env.routes.graphs.values(), stages)}
    for stage, next_stage in sorted(ends):
        for address in addresses.get(next_stage, ()):
            if address in links:
                yield catalogue.EDGE_LINKS.of(1, stage, next_stage, *wire_of(links[address]))


def _addresses(env: Environment) -> dict[str, list[str]]:
    """Where each stage, and the result store, takes messages."""
    found: dict[str, list[str]] = {}
    for actor in env.routes.table.actors:
        if actor.address:
            found.setdefault(actor.stage, []).append(actor.address)
    stores = [node for node in env.routes.table.nodes if "store" in node.roles]
    found[STORE] = [f"{node.address}/{STORE_REGION}" for node in stores]
    return found


def retained(env: Environment, stages: Collection[str]) -> Iterator[Sample]:
    """What is retained, of which edge, and what is on its way; 0 for edges of these stages with nothing."""
    retainer, graphs = env.retainer, env.routes.graphs
    for edge in edges_from(graphs.values(), stages):
        for place in _PLACES.values() if edge.is_retained else ():
            yield catalogue.RETAINED_BYTES.of(0, edge.stage, edge.next_stage, place)
            yield catalogue.RETAINED_OUTPUTS.of(0, edge.stage, edge.next_stage, place)
    for target, where, length in retainer.held():
        graph = graphs.get(target.header.workflow)
        node = None if graph is None else graph.find(target.header.source)
        labels = "" if node is None else node.stage, target.stage, _PLACES[where]
        yield catalogue.RETAINED_BYTES.of(length, *labels)
        yield catalogue.RETAINED_OUTPUTS.of(1, *labels)
    yield catalogue.RETAINED_LIMIT_BYTES.of(retainer.memory_bytes_max, Place.MEMORY.value)
    yield catalogue.RETAINED_LIMIT_BYTES.of(retainer.disk_bytes_max, Place.DISK.value)
    yield catalogue.SENDING_BYTES.of(retainer.sending_bytes)
    yield catalogue.SENDING_LIMIT_BYTES.of(retainer.memory_bytes_max)
    yield catalogue.STAGES_HELD_BACK.of(not retainer.has_room)


_PLACES: Final = {
    Place.MEMORY: Place.MEMORY.value,
    Place.SPILLING: Place.MEMORY.value,
    Place.DISK: Place.DISK.value,
}
"""What is just being spilled lies in memory."""


def resent(env: Environment, stages: Collection[str]) -> Iterator[Sample]:
    """Outputs that were sent again, and zeros for the edges that begin at these stages."""
    nexts = {edge.next_stage for edge in edges_from(env.routes.graphs.values(), stages)}
    for next_stage in nexts:
        for reason in RESEND_REASONS:
            yield catalogue.OUTPUTS_RESENT.of(0, next_stage, reason)
    for (next_stage, reason), count in env.counts.resent.items():
        yield catalogue.OUTPUTS_RESENT.of(count, next_stage, reason)
