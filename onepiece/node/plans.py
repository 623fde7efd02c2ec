"""What the owner of a request needs of its workflow."""

from onepiece.core.request_record import Plan
from onepiece.graph import FromStage, WorkflowGraph


def plan_of(graph: WorkflowGraph) -> Plan:
    """A workflow's graph as its owner needs it."""
    unretained = frozenset(
        (source.node, node.id)
        for node in graph.nodes
        for source in node.inputs.values()
        if isinstance(source, FromStage) and not source.is_retained
    )
    return Plan(
        sources={node.id: graph.predecessors(node.id) for node in graph.nodes},
        output=graph.output.node,
        unretained=unretained,
        checkpoints=frozenset(node.id for node in graph.nodes if graph.stages[node.stage].checkpoint),
    )
