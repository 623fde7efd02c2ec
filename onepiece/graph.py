r"""A workflow as plain data: what ``@workflow`` draws, nodes exchange, and the runtime follows.

::

    inputs      prompt: str            image: bytes
                   |                      |        \
    nodes       encode_text        encode_image   encode_latents
                   |                      |         /      \\
                denoise <-----------------+--------         |
                   |                                        |
                decode <------------------------------------
                   |
    output      bytes

An edge is a *source* in a node's inputs: ``FromInput`` (a workflow input), ``FromStage`` (what another
node returned, or an item of it) or ``Constant``. The nodes are in topological order, each reaches the
output, and each type fits: ``WorkflowGraph`` objects that ``@workflow`` made need no further check.
"""

import copy
import enum
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final, TypeAlias

from attrs import field, frozen

from onepiece._control import PlainValue, register
from onepiece._values import Mismatch, TooLarge, check_value, conform, show_value
from onepiece.errors import DefinitionError, InvalidInput, PayloadTooLarge, WiringError
from onepiece.types import Kind, TypeSpec

__all__ = [
    "INPUTS",
    "Constant",
    "FromInput",
    "FromStage",
    "GraphNode",
    "InboxMemory",
    "Isolation",
    "Kind",
    "Parameter",
    "ResourceKind",
    "Resources",
    "Source",
    "StageSpec",
    "TypeSpec",
    "Use",
    "WorkflowGraph",
    "check_inputs",
    "check_value",
]

INPUTS: Final = "@inputs"
"""What ``WorkflowGraph.predecessors`` calls the workflow's inputs; no node can have this id."""


class ResourceKind(enum.Enum):
    """The device that a stage runs on."""

    GPU = "gpu"
    CPU = "cpu"


@frozen
class Resources:
    """What one instance of a stage occupies."""

    kind: ResourceKind = ResourceKind.CPU
    memory_bytes: int = 0
    count: int = 1
    """Devices of one instance; more than one means Collaboration Mode."""


class Isolation(enum.Enum):
    """Where a stage's coroutine runs."""

    THREAD = "thread"
    """On a thread and event loop of the device's own: what blocks there never stops the node."""
    LOOP = "loop"
    """On the node's event loop: the cheapest, for stages that never block."""
    PROCESS = "process"
    """In a helper process of the actor: what crashes there leaves the node alone."""


class InboxMemory(enum.Enum):
    """Where an instance's inputs arrive."""

    HOST = "host"
    DEVICE = "device"
    """In the memory of the GPU that it runs on: tensors come there without passing through the host's."""


@frozen
class Parameter:
    """One parameter of a stage or input of a workflow."""

    name: str
    type: TypeSpec
    required: bool = True
    default: PlainValue = None

    def __str__(self) -> str:
        return f"{self.name}: {self.type}" + ("" if self.required else f" = {show_value(self.default)}")


@frozen
class StageSpec:
    """A stage's signature and needs, without its code."""

    key: str
    """``module:qualname`` of its function."""
    name: str
    parameters: tuple[Parameter, ...]
    returns: TypeSpec
    resources: Resources = Resources()
    timeout_seconds: float | None = None
    instances: int = 1
    isolation: Isolation = Isolation.THREAD
    concurrency: int = 1
    checkpoint: bool = False
    """Whether its output is kept in the result store until the request has ended."""
    inbox: InboxMemory = InboxMemory.HOST

    @cached_property
    def _parameters_by_name(self) -> Mapping[str, Parameter]:
        return {each.name: each for each in self.parameters}

    @property
    def is_collaborative(self) -> bool:
        """Whether all devices of an instance work on one request (Collaboration Mode)."""
        return self.resources.count > 1

    def parameter(self, name: str) -> Parameter | None:
        """The parameter of this name."""
        return self._parameters_by_name.get(name)

    @property
    def signature(self) -> str:
        """The schema as text: ``denoise(text: Tensor, steps: int = 40) -> Tensor``."""
        return f"{self.name}({', '.join(map(str, self.parameters))}) -> {self.returns}"


@frozen
class FromInput:
    """The workflow's input of this name."""

    name: str


@frozen
class FromStage:
    """What a node returned, or the item of it that ``path`` leads to (``onepiece.codec.select``)."""

    node: str
    path: tuple[int | str, ...] = ()
    is_retained: bool = True
    """Whether the value is kept until the node that takes it is done; else it is sent at most once."""

    def __str__(self) -> str:
        steps = "".join(f".{step}" if isinstance(step, str) else f"[{step}]" for step in self.path)
        return f"{self.node}{steps}"


@frozen
class Constant:
    """A value that the workflow's own text holds."""

    value: PlainValue


Source: TypeAlias = FromInput | FromStage | Constant


@frozen
class GraphNode:
    """One call of a stage."""

    id: str
    """The stage's name, made unique: ``denoise``, ``denoise_2``."""
    stage: str
    """The stage's key in ``WorkflowGraph.stages``."""
    inputs: Mapping[str, Source]
    """A source for each parameter that is not left at its default."""


@frozen
class Use:
    """What one graph node takes from another one's value."""

    node: GraphNode
    parts: Mapping[str, tuple[int | str, ...]]
    """Parameter -> which item of the value."""
    is_retained: bool
    """All of it may be: it is one message."""


@register
@frozen
class WorkflowGraph:
    """A whole workflow; what is asked of it for each message is looked up, not searched."""

    name: str
    module: str
    """``module:attribute`` of the workflow."""
    inputs: tuple[Parameter, ...]
    nodes: tuple[GraphNode, ...]
    """In topological order."""
    output: FromStage
    returns: TypeSpec
    stages: Mapping[str, StageSpec]
    schema_text: str = field(init=False)
    """The types and wires as text; two nodes hold the same workflow if it is the same."""
    digest: str = field(init=False)
    """A short hash of ``schema_text``."""

    @schema_text.default
    def _schema_text(self) -> str:
        return "\n".join(self._schema_lines())

    @digest.default
    def _digest(self) -> str:
        return hashlib.sha256(self.schema_text.encode()).hexdigest()[:16]

    def _schema_lines(self) -> Sequence[str]:
        inputs = ", ".join(map(str, self.inputs))
        lines = [f"workflow {self.name}({inputs}) -> {self.returns}"]
        lines += [f"record {text}" for text in sorted(self._record_texts())]
        lines += [f"stage {_stage_text(spec)}" for spec in self.stages.values()]
        for each in self.nodes:
            sources = ", ".join(f"{name}={_source_text(source)}" for name, source in each.inputs.items())
            lines.append(f"{each.id} = {self.stages[each.stage].name}({sources})")
        return [*lines, f"return {_source_text(self.output)}"]

    def _record_texts(self) -> set[str]:
        types = [each.type for each in self.inputs]
        for spec in self.stages.values():
            types += [spec.returns, *(each.type for each in spec.parameters)]
        return {
            f"{record.name.rpartition(':')[0]}:{record.definition}"
            for each in types
            for record in each.records()
        }

    @cached_property
    def _nodes_by_id(self) -> Mapping[str, GraphNode]:
        return {node.id: node for node in self.nodes}

    @cached_property
    def _sources(self) -> Mapping[str, tuple[str, ...]]:
        return {node.id: _sources_of(node) for node in self.nodes}

    @cached_property
    def _uses(self) -> Mapping[str, tuple[Use, ...]]:
        found: dict[str, list[Use]] = {}
        for node in self.nodes:
            for source in _sources_of(node):
                if source != INPUTS:
                    found.setdefault(source, []).append(_use_of(node, source))
        return {source: tuple(uses) for source, uses in found.items()}

    def find(self, node_id: str) -> GraphNode | None:
        """The node of this id, if there is one."""
        return self._nodes_by_id.get(node_id)

    def node(self, node_id: str) -> GraphNode:
        """The node of this id, which must exist."""
        return self._nodes_by_id[node_id]

    def uses(self, node_id: str) -> tuple[Use, ...]:
        """Who takes what from the value of a node."""
        return self._uses.get(node_id, ())

    def stage_of(self, node_id: str) -> StageSpec:
        """The stage that the node calls."""
        return self.stages[self.node(node_id).stage]

    def predecessors(self, node_id: str) -> tuple[str, ...]:
        """The ids of the nodes whose results the node needs, and ``INPUTS`` if it needs inputs.

        A node of constants alone waits for ``INPUTS``, too: it starts when the request does.
        """
        return self._sources[node_id]

    def successors(self, node_id: str) -> tuple[str, ...]:
        """The ids of the nodes that need this node's result, or with ``INPUTS`` the inputs."""
        return tuple(each.id for each in self.nodes if node_id in self.predecessors(each.id))

    @property
    def entry_nodes(self) -> tuple[str, ...]:
        """The nodes that the inputs are sent to."""
        return self.successors(INPUTS)

    def input(self, name: str) -> Parameter | None:
        """The workflow input of this name."""
        return next((each for each in self.inputs if each.name == name), None)


def _sources_of(node: GraphNode) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for source in node.inputs.values():
        match source:
            case FromStage(node=node_id):
                found[node_id] = None
            case FromInput():
                found[INPUTS] = None
    return tuple(found) or (INPUTS,)


def _use_of(node: GraphNode, source: str) -> Use:
    wires = {
        name: wire
        for name, wire in node.inputs.items()
        if isinstance(wire, FromStage) and wire.node == source
    }
    parts = {name: wire.path for name, wire in wires.items()}
    return Use(node, parts, all(wire.is_retained for wire in wires.values()))


def _stage_text(spec: StageSpec) -> str:
    return f"{spec.signature}, checkpoint" if spec.checkpoint else spec.signature


def _source_text(source: Source) -> str:
    match source:
        case FromInput(name=name):
            return name
        case FromStage(is_retained=is_retained):
            return str(source) if is_retained else f"at_most_once({source})"
        case Constant(value=value):
            return show_value(value)


def check_inputs(graph: WorkflowGraph, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Check what a client sent against the workflow's signature.

    Args:
        graph: The workflow.
        raw: Values by input name, as Python or JSON gives them: a list does for a tuple, an object for
            a record, ``3`` for ``3.0``.

    Returns:
        A value for every input, of the type the signature says; defaults are filled in.

    Raises:
        InvalidInput: A field is unknown, missing or of the wrong type; it is named, with the type that
            is wanted and what came.
        PayloadTooLarge: A field exceeds a bound, which is named.
    """
    known = ", ".join(map(str, graph.inputs)) or "none"
    for name in raw:
        if graph.input(name) is None:
            raise InvalidInput(
                f"workflow {graph.name!r} has no input {str(name)[:100]!r}; its inputs are: {known}",
                workflow=graph.name,
                field=str(name)[:100],
            )
    checked: dict[str, Any] = {}
    for parameter in graph.inputs:
        if parameter.name in raw:
            checked[parameter.name] = _checked_input(graph, parameter, raw[parameter.name])
        elif parameter.required:
            raise InvalidInput(
                f"workflow {graph.name!r} needs the input {parameter.name!r} ({parameter.type});"
                f" its inputs are: {known}",
                workflow=graph.name,
                field=parameter.name,
                expected=str(parameter.type),
            )
        else:
            checked[parameter.name] = copy.deepcopy(parameter.default)  # it may be a list
    return checked


def _checked_input(graph: WorkflowGraph, parameter: Parameter, value: Any) -> Any:
    where = {"workflow": graph.name, "field": parameter.name, "expected": str(parameter.type)}
    try:
        return conform(parameter.type, value, "")
    except TooLarge as error:
        raise PayloadTooLarge(
            f"workflow {graph.name!r}, input {parameter.name!r}: {error}", **where, bound=error.bound
        ) from error
    except Mismatch as error:
        raise InvalidInput(f"workflow {graph.name!r}, input {parameter.name!r}: {error}", **where) from error


def validate(graph: WorkflowGraph) -> None:
    """Check what ``@workflow`` promises of every graph; for graphs that come from elsewhere.

    Raises:
        DefinitionError: Nodes are missing, out of order or repeated, or do not reach the output.
        WiringError: A source's type does not fit the parameter it is wired to.
    """
    results: dict[str, TypeSpec] = {}
    for node in graph.nodes:
        spec = graph.stages.get(node.stage)
        if spec is None or node.id in results or node.id == INPUTS:
            raise DefinitionError(f"workflow {graph.name!r}: node {node.id!r} repeats or has no stage")
        for name, source in node.inputs.items():
            parameter = spec.parameter(name)
            if parameter is None:
                raise DefinitionError(f"workflow {graph.name!r}: stage {spec.signature} has no {name!r}")
            why = source_refusal(graph.inputs, results, source, parameter.type)
            if why is not None:
                raise WiringError(f"workflow {graph.name!r}: {node.id}.{name}: {why}")
        missing = [each.name for each in spec.parameters if each.required and each.name not in node.inputs]
        if missing:
            raise DefinitionError(f"workflow {graph.name!r}: {node.id} lacks {', '.join(missing)}")
        results[node.id] = spec.returns
    why = source_refusal(graph.inputs, results, graph.output, graph.returns)
    if why is not None:
        raise WiringError(f"workflow {graph.name!r}: its output: {why}")
    idle = unreached(graph.nodes, graph.output)
    if idle:
        verb = "never reaches" if len(idle) == 1 else "never reach"
        raise DefinitionError(f"workflow {graph.name!r}: {', '.join(idle)} {verb} its output")


def source_refusal(
    inputs: Sequence[Parameter], results: Mapping[str, TypeSpec], source: Source, wanted: TypeSpec
) -> str | None:
    """Why the source must not be wired to a parameter of type ``wanted``; None if it may."""
    match source:
        case Constant(value=value):
            return check_value(wanted, value)
        case FromInput(name=name):
            given = next((each.type for each in inputs if each.name == name), None)
        case FromStage(node=node, path=path):
            given = results[node].select(path) if node in results else None
    return wanted.accepts(given) if given is not None else f"{_source_text(source)} does not exist"


def unreached(nodes: Sequence[GraphNode], output: FromStage) -> list[str]:
    """The ids of the nodes whose results nobody uses."""
    needed = {output.node}
    for node in reversed(nodes):
        if node.id in needed:
            needed.update(source.node for source in node.inputs.values() if isinstance(source, FromStage))
    return [node.id for node in nodes if node.id not in needed]
