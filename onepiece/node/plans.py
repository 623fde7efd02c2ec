"""Requests and workflows as the table of their owner needs them."""

from onepiece.core.request_events import Accepted
from onepiece.core.request_record import Plan
from onepiece.graph import FromStage, WorkflowGraph
from onepiece.record_messages import RequestRecord


def accepted(graph: WorkflowGraph, record: RequestRecord) -> Accepted:
    """A request that is in the stores, as its owner's table takes it."""
    return Accepted(record.uid, record.workflow, _plan_of(graph), record.deadline_at, record.key)


def _plan_of(graph: WorkflowGraph) -> Plan:
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
