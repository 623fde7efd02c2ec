"""Workflows: functions that are run once, at definition, to draw a static graph of stages."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, ParamSpec, TypeVar, cast, overload

from attrs import field, frozen

from onepiece import limits
from onepiece._bounded import text_of
from onepiece._placeholder import Placeholder, drawing_of, source_of, type_of, unretained
from onepiece._values import describe
from onepiece.errors import ConfigError, DefinitionError, InvalidInput, WiringError
from onepiece.graph import (
    Constant,
    FromInput,
    FromStage,
    GraphNode,
    Parameter,
    Source,
    WorkflowGraph,
    check_inputs,
    validate,
)
from onepiece.stage import Stage, check_constant, check_name, drawing, read_parameters, read_returns
from onepiece.types import TypeSpec

Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")
Output_co = TypeVar("Output_co", covariant=True)
Value = TypeVar("Value")

AnyStage = Stage[Any, Any, Any]


@frozen
class WorkflowCall(Generic[Output_co]):
    """A workflow with its inputs, for ``client.submit``: checked, not sent yet."""

    workflow: str
    """The workflow's name."""
    module: str
    """``module:attribute`` of the workflow."""
    inputs: Mapping[str, Any]
    """A value for every input; defaults are filled in."""
    returns: TypeSpec
    """The type of the result."""


@frozen(eq=False)
class Workflow(Generic[Inputs, Output]):
    """A workflow: its graph, and the stages that the graph's keys stand for.

    Calling it checks the inputs and gives a ``WorkflowCall``; nothing runs.
    """

    name: str
    function: Callable[Inputs, Output]
    graph: WorkflowGraph
    stages: Mapping[str, AnyStage]
    """The stages by key."""
    signature: inspect.Signature = field(repr=False)

    def __call__(self, *args: Inputs.args, **kwargs: Inputs.kwargs) -> WorkflowCall[Output]:
        """Fill in the inputs.

        Raises:
            InvalidInput: An input is unknown, missing or of the wrong type.
            PayloadTooLarge: An input exceeds a bound.
            DefinitionError: It is called inside another workflow.
        """
        current = drawing.get()
        if current is not None:
            raise DefinitionError(
                f"workflow {self.name!r} is called inside another workflow; call its stages there"
            )
        try:
            given = self.signature.bind_partial(*args, **kwargs).arguments
        except TypeError as error:
            known = ", ".join(map(str, self.graph.inputs)) or "none"
            raise InvalidInput(f"workflow {self.name!r}: {error}; its inputs are: {known}") from error
        return WorkflowCall(self.name, self.graph.module, check_inputs(self.graph, given), self.graph.returns)


@overload
def workflow(function: Callable[Inputs, Output], /) -> Workflow[Inputs, Output]: ...


@overload
def workflow(*, name: str | None = ...) -> Callable[[Callable[Inputs, Output]], Workflow[Inputs, Output]]: ...


def workflow(function: Any = None, /, *, name: str | None = None) -> Any:
    """Draw the graph of a function that calls stages; it runs here, once, with placeholders.

    Args:
        function: A plain function; its parameters and result are annotated. It passes its parameters
            and the results of stages to stages, and returns the result of one.
        name: The workflow's name; the function's if not given.

    Raises:
        WiringError: A value is wired to a parameter of another type; both schemas are named.
        DefinitionError: Anything else is wrong with the definition.
    """

    def decorate(function: Any) -> Workflow[Any, Any]:
        return _trace(function, str(name or getattr(function, "__name__", "")))

    return decorate if function is None else decorate(function)


def at_most_once(value: Value) -> Value:
    """Mark a result where a workflow passes it on: it is not kept for sending it again.

    By default a stage's output is kept by its node until whoever takes it has handed on its own. That
    costs memory for as long; where computing the output again is cheaper than keeping it, write
    ``decode(at_most_once(denoise(...)))``. If a node dies while it has the only copy, the request goes on
    from what is kept before it. Where one stage takes several items of a result, they travel in one
    message, which is kept only if none of them is marked.

    Args:
        value: What a stage returned in this workflow, or an item of it.

    Returns:
        The same, marked.

    Raises:
        DefinitionError: It is no result of a stage.
    """
    if not isinstance(value, Placeholder):
        raise DefinitionError(
            f"at_most_once is given {describe(value)}; inside a workflow it marks what a stage returns"
        )
    return cast(Value, unretained(value))


def load_workflow(reference: str) -> Workflow[Any, Any]:
    """Import the workflow that ``module:attribute`` names.

    Raises:
        ConfigError: There is no such module or attribute, or it is no workflow.
        DefinitionError: The module defines a stage or workflow wrongly.
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{reference!r} names no workflow; expected module:attribute, as stages.echo:echo")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"the module of {reference!r} cannot be imported: {text_of(error)}") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, Workflow):
        known = sorted(name for name, value in vars(module).items() if isinstance(value, Workflow))
        raise ConfigError(
            f"{module_name} has no workflow {attribute!r}; it has: {', '.join(known) or 'none'}"
        )
    return found


class _Drawing:
    """The graph of one workflow while its function runs."""

    def __init__(self, where: str, inputs: tuple[Parameter, ...]) -> None:
        self.where: Final = where
        self.inputs: Final = inputs
        self.nodes: Final[list[GraphNode]] = []
        self.stages: Final[dict[str, AnyStage]] = {}

    def add(self, stage: AnyStage, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Placeholder:
        """Draw a node for a call of ``stage``."""
        if len(self.nodes) == limits.STAGES_PER_WORKFLOW_MAX:
            raise DefinitionError(f"{self.where} has more than {limits.STAGES_PER_WORKFLOW_MAX} nodes")
        known = self.stages.setdefault(stage.key, stage)
        if known is not stage:
            raise DefinitionError(f"{self.where}: two different stages are called {stage.key!r}")
        node_id = self._unique(stage.name)
        try:
            given = stage.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise DefinitionError(f"{self.where}, stage {stage.spec.signature}: {error}") from error
        sources = {name: self._source(stage, name, value) for name, value in given.items()}
        self.nodes.append(GraphNode(node_id, stage.key, sources))
        return Placeholder(self, FromStage(node_id), stage.spec.returns)

    def _unique(self, name: str) -> str:
        taken = {node.id for node in self.nodes}
        candidates = (name if n == 1 else f"{name}_{n}" for n in range(1, len(taken) + 2))
        return next(candidate for candidate in candidates if candidate not in taken)

    def _source(self, stage: AnyStage, name: str, value: Any) -> Source:
        label = f"{self.where}, stage {stage.name!r}, parameter {name!r}"
        parameter = stage.spec.parameter(name)
        assert parameter is not None
        if isinstance(value, Placeholder):
            source = self.own_source(value, label)
            why = parameter.type.accepts(type_of(value))
            if why is not None:
                raise WiringError(
                    f"{label}: {why}; {_shown_source(source, type_of(value), self.stages, self.nodes)}"
                    f" does not fit {stage.spec.signature}",
                    stage=stage.name,
                    parameter=name,
                    expected=str(parameter.type),
                    given=str(type_of(value)),
                )
            return source
        if _holds_placeholder(value):
            raise DefinitionError(
                f"{label}: a {type(value).__name__} holds results of stages; pass each as a parameter of its"
                " own, so that each is a wire"
            )
        check_constant(parameter.type, value, label)
        return Constant(value)

    def own_source(self, value: Placeholder, label: str) -> FromInput | FromStage:
        """The placeholder's source, if it belongs to this drawing."""
        if drawing_of(value) is not self:
            raise DefinitionError(f"{label}: {value!r} belongs to another workflow")
        return source_of(value)


def _shown_source(
    source: FromInput | FromStage,
    given: TypeSpec,
    stages: Mapping[str, AnyStage],
    nodes: Iterable[GraphNode],
) -> str:
    """The giving side's schema."""
    if isinstance(source, FromInput):
        return f"the input {source.name}: {given}"
    key = next(node.stage for node in nodes if node.id == source.node)
    schema = stages[key].spec.signature
    return f"{source}: {given} of {schema}" if source.path else schema


def _holds_placeholder(value: object, depth: int = 0) -> bool:
    if isinstance(value, Placeholder):
        return True
    if depth > limits.TREE_DEPTH_MAX:
        return False
    if isinstance(value, list | tuple | set | frozenset):
        return any(_holds_placeholder(item, depth + 1) for item in value)
    if isinstance(value, Mapping):
        return any(_holds_placeholder(item, depth + 1) for item in value.values())
    return False


def _trace(function: Any, name: str) -> Workflow[Any, Any]:
    where = f"workflow {name!r}"
    check_name(name, where)
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        raise DefinitionError(
            f"{where} must be a plain 'def' function: it draws a graph, and waits for nothing"
        )
    signature = inspect.signature(function)
    inputs = read_parameters(function, list(signature.parameters.values()), where)
    returns = read_returns(function, signature, where)
    picture = _Drawing(where, inputs)
    placeholders = {each.name: Placeholder(picture, FromInput(each.name), each.type) for each in inputs}
    if drawing.get() is not None:
        raise DefinitionError(f"{where} is defined inside another workflow")
    token = drawing.set(picture)
    try:
        output = function(**placeholders)
    finally:
        drawing.reset(token)
    graph = WorkflowGraph(
        name=name,
        module=f"{function.__module__}:{function.__qualname__}",
        inputs=inputs,
        nodes=tuple(picture.nodes),
        output=_output(picture, output, returns),
        returns=returns,
        stages={key: each.spec for key, each in picture.stages.items()},
    )
    validate(graph)
    return Workflow(name, function, graph, picture.stages, signature)


def _output(picture: _Drawing, output: Any, returns: TypeSpec) -> FromStage:
    if not isinstance(output, Placeholder):
        what = "several values" if _holds_placeholder(output) else repr(output)[:80]
        raise DefinitionError(
            f"{picture.where} returns {what}; it must return the result of one stage, which may take others'"
        )
    source = picture.own_source(output, f"{picture.where}, its result")
    if isinstance(source, FromInput):
        raise DefinitionError(f"{picture.where} returns its input {source.name!r}; it must call a stage")
    why = returns.accepts(type_of(output))
    if why is not None:
        schema = _shown_source(source, type_of(output), picture.stages, picture.nodes)
        raise WiringError(
            f"{picture.where}, its result: {why}; {schema} does not fit -> {returns}",
            expected=str(returns),
            given=str(type_of(output)),
        )
    return source
