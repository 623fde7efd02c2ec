"""Where a stage's value goes: one message for each graph node that uses a part of it.

A message holds just the parameters that its graph node takes from the value. The workflow's own output
goes to the result store.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import evolve, frozen

from onepiece.codec import Packed, PackedAnywhere, pack, pack_on_device, select, value_to_bytes
from onepiece.errors import SchemaMismatch
from onepiece.graph import INPUTS, FromInput, InboxMemory, WorkflowGraph
from onepiece.messages import STORE, ResultInput, StageInput, Trail
from onepiece.record_messages import RequestRecord
from onepiece.types import Kind

BYTES_TYPE: Final = "application/octet-stream"
VALUE_TYPE: Final = "application/vnd.onepiece.value"


@frozen
class StageTarget:
    """A graph node that takes parameters from a stage's value."""

    header: StageInput
    stage: str
    parts: Mapping[str, tuple[int | str, ...]]
    """Parameter -> which item of the value."""
    is_retained: bool = True
    inbox: InboxMemory = InboxMemory.HOST
    """Where the stage has its inputs arrive."""

    def pack(self, value: Any) -> PackedAnywhere:
        """The message with this node's parameters; tensors on GPUs stay there if they are wanted on one."""
        lay_out = pack_on_device if self.inbox is InboxMemory.DEVICE else pack
        return lay_out(self.header, {name: select(value, path) for name, path in self.parts.items()})


@frozen
class InputTarget:
    """A graph node that takes parameters from the workflow's inputs."""

    header: StageInput
    stage: str
    names: Mapping[str, str]
    """Parameter -> which input."""
    is_retained: bool = False
    """The owner keeps the inputs themselves."""

    def pack(self, inputs: Mapping[str, Any]) -> Packed:
        """The message with this node's inputs; raises ``SchemaMismatch`` if they are another version's."""
        missing = set(self.names.values()) - inputs.keys()
        if missing:
            raise SchemaMismatch(
                f"request {self.header.uid} has no input {min(missing)!r}, which {self.stage} wants: it was "
                "accepted for another version of its workflow",
                uid=self.header.uid,
            )
        return pack(self.header, {name: inputs[source] for name, source in self.names.items()})


@frozen
class StoreTarget:
    """The result store, for the workflow's own output."""

    header: ResultInput
    path: tuple[int | str, ...]
    is_retained: bool = True
    stage: str = STORE
    """As if it were one."""

    def pack(self, value: Any) -> Packed:
        """The message with the result: as it is where it is bytes, else in the project's own form."""
        result = select(value, self.path)
        if self.header.content_type != BYTES_TYPE:
            result = b"".join(value_to_bytes(result))
        return pack(self.header, {"value": result})


Target = StageTarget | InputTarget | StoreTarget


def targets_of(
    graph: WorkflowGraph,
    header: StageInput,
    trail: Trail,
    retained_by: str | None,
    now: float,
) -> dict[str, Target]:
    """Where the value of ``header.node`` goes, by graph node (or ``STORE``).

    What goes to one graph node is one message: it is retained only if each of its parts may be.
    """
    found: dict[str, Target] = {}
    for use in graph.uses(header.node):
        onward = StageInput(
            uid=header.uid,
            workflow=header.workflow,
            node=use.node.id,
            source=header.node,
            owner=header.owner,
            received_at=header.received_at,
            deadline_at=header.deadline_at,
            sent_at=now,
            joins=header.joins,
            trail=trail,
            retained_by=retained_by if use.is_retained else None,
            terms=header.terms,
        )
        inbox = graph.stages[use.node.stage].inbox
        found[use.node.id] = StageTarget(onward, use.node.stage, use.parts, use.is_retained, inbox)
    if graph.output.node == header.node:
        is_retained = graph.output.is_retained
        result = ResultInput(
            uid=header.uid,
            workflow=header.workflow,
            owner=header.owner,
            content_type=content_type_of(graph),
            sent_at=now,
            trail=trail,
            source=header.node,
            retained_by=retained_by if is_retained else None,
        )
        found[STORE] = StoreTarget(result, graph.output.path, is_retained)
    return found


def retained_targets(graph: WorkflowGraph, node_id: str) -> set[str]:
    """Where the value of a graph node goes that retains what it sends, by graph node (or ``STORE``)."""
    found = {use.node.id for use in graph.uses(node_id) if use.is_retained}
    if graph.output.node == node_id and graph.output.is_retained:
        found.add(STORE)
    return found


def content_type_of(graph: WorkflowGraph) -> str:
    """What a result is served as: raw bytes as they are, everything else in the project's own form."""
    return BYTES_TYPE if graph.returns.kind is Kind.BYTES else VALUE_TYPE


def pack_record(record: RequestRecord, inputs: Mapping[str, Any]) -> Packed:
    """A request's inputs as they are kept on store nodes."""
    return pack(record, inputs)


def input_targets(graph: WorkflowGraph, header: StageInput) -> Iterator[tuple[str, InputTarget]]:
    """The graph nodes that take some of the workflow's inputs."""
    for node_id in graph.entry_nodes:
        node = graph.node(node_id)
        names = {name: source.name for name, source in node.inputs.items() if isinstance(source, FromInput)}
        onward = evolve(header, node=node_id, source=INPUTS)
        yield node_id, InputTarget(onward, node.stage, names)
