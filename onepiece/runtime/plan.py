"""What a workflow's graph says about one node, worked out once instead of with each message."""

from collections.abc import Mapping
from typing import Any, Final

from attrs import define, field, frozen

from onepiece.graph import Constant, FromInput, FromStage, GraphNode, WorkflowGraph
from onepiece.types import Kind

BYTES_TYPE: Final = "application/octet-stream"
VALUE_TYPE: Final = "application/vnd.onepiece.value"

Path = tuple[int | str, ...]


@frozen
class Onward:
    """A graph node that takes parameters from another one's value."""

    node: str
    stage: str
    parts: Mapping[str, Path]
    """Parameter -> which item of the value."""


@frozen
class NodePlan:
    """One node of a graph, and where its value goes."""

    node: str
    stage: str
    sources: frozenset[str]
    constants: Mapping[str, Any]
    """Parameters whose values stand in the workflow's own text."""
    onward: tuple[Onward, ...]
    result_path: Path | None
    """Which item of its value is the workflow's output; None if none is."""
    content_type: str
    """What the workflow's output is served as."""


@frozen
class Entry:
    """A graph node that takes parameters from the workflow's inputs."""

    node: str
    stage: str
    names: Mapping[str, str]
    """Parameter -> which input."""


@frozen
class GraphPlan:
    """All of a graph's nodes."""

    graph: WorkflowGraph
    nodes: Mapping[str, NodePlan]
    entries: tuple[Entry, ...]
    joins: tuple[NodePlan, ...]
    """Nodes with several sources."""


@define(eq=False)
class Plans:
    """The plans of the graphs that a node knows, each worked out on first use."""

    _plans: dict[str, GraphPlan] = field(factory=dict)

    def of(self, graph: WorkflowGraph) -> GraphPlan:
        """The plan of a graph; an older graph of the same name is forgotten."""
        plan = self._plans.get(graph.name)
        if plan is None or plan.graph is not graph:
            plan = self._plans[graph.name] = plan_of(graph)
        return plan


def plan_of(graph: WorkflowGraph) -> GraphPlan:
    """Work out a graph."""
    nodes = {node.id: _node_plan(graph, node) for node in graph.nodes}
    entries = tuple(
        Entry(node.id, node.stage, _names(node)) for node in graph.nodes if node.id in graph.entry_nodes
    )
    return GraphPlan(graph, nodes, entries, tuple(plan for plan in nodes.values() if len(plan.sources) > 1))


def content_type_of(graph: WorkflowGraph) -> str:
    """What a result is served as: raw bytes as they are, everything else in the project's own form."""
    return BYTES_TYPE if graph.returns.kind is Kind.BYTES else VALUE_TYPE


def _node_plan(graph: WorkflowGraph, node: GraphNode) -> NodePlan:
    return NodePlan(
        node=node.id,
        stage=node.stage,
        sources=frozenset(graph.predecessors(node.id)),
        constants={name: each.value for name, each in node.inputs.items() if isinstance(each, Constant)},
        onward=tuple(
            Onward(other.id, other.stage, parts) for other in graph.nodes if (parts := _parts(other, node.id))
        ),
        result_path=graph.output.path if graph.output.node == node.id else None,
        content_type=content_type_of(graph),
    )


def _parts(node: GraphNode, source: str) -> dict[str, Path]:
    return {
        name: each.path
        for name, each in node.inputs.items()
        if isinstance(each, FromStage) and each.node == source
    }


def _names(node: GraphNode) -> dict[str, str]:
    return {name: each.name for name, each in node.inputs.items() if isinstance(each, FromInput)}
