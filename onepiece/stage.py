"""Stages: async functions with a signature that is checked and needs that are stated."""

import contextlib
import inspect
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Concatenate, Final, Generic, Literal, ParamSpec, Protocol, TypeVar, cast, overload

from attrs import field, frozen

from onepiece import limits
from onepiece._annotations import resolve, type_spec
from onepiece._cbor import encode
from onepiece._tree import TreeWriter
from onepiece.context import StageContext
from onepiece.errors import CodecError, DefinitionError
from onepiece.graph import InboxMemory, Isolation, Parameter, ResourceKind, Resources, StageSpec, check_value
from onepiece.types import TypeSpec

State = TypeVar("State")
Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")

Setup = Callable[[StageContext[None]], AsyncIterator[State]]
"""An async generator function: what is before its ``yield`` loads, what is behind it unloads."""

Body = Callable[Concatenate[StageContext[State], Inputs], Coroutine[Any, Any, Output]]

Merge = Callable[[list[Output]], Output]
"""Makes one result of the partial results of a stage's ranks, in the order of the ranks."""

Weights = Callable[[], Iterable[str | os.PathLike[str]]]
"""Names the files, or directories of files, that a stage loads."""

_CONTEXT_NAMES: Final = frozenset({"ctx", "context", "_", "_ctx", "_context"})
_NO_PARAMETER: Final = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY)
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


@frozen
class Gpu:
    """One instance of the stage occupies GPUs.

    Args:
        memory_gib: Memory of each, in GiB; a stage is placed only where so much is free.
        count: How many; with more than one all work on the same request (Collaboration Mode).
    """

    memory_gib: float = 0.0
    count: int = 1


@frozen
class Cpu:
    """One instance of the stage occupies processors.

    Args:
        memory_gib: Host memory in GiB, of each.
        count: How many; with more than one all work on the same request (Collaboration Mode).
    """

    memory_gib: float = 0.0
    count: int = 1


class Drawing(Protocol):
    """A workflow that is being traced: a stage called meanwhile becomes a node in it."""

    def add(self, stage: "Stage[Any, Any, Any]", args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Draw a node and return the placeholder of its result."""


drawing: Final[ContextVar[Drawing | None]] = ContextVar("onepiece_drawing", default=None)


@frozen(eq=False)
class Stage(Generic[State, Inputs, Output]):
    """A stage: an async function, its signature, its needs.

    Called inside a ``@workflow`` function, without the context, it draws a node of the graph. Called
    outside, with a context, it is the plain function (``onepiece.testing.stage_context`` makes one).
    Type checkers know the first form alone; for the second, ``stage.function(ctx, ...)`` has the type.
    (Overloads would make every call with a ``Tensor``, which is ``Any`` to them, ambiguous.)
    """

    name: str
    key: str
    """``module:qualname`` of the function."""
    function: "Body[State, Inputs, Output]"
    setup: "Setup[State] | None"
    spec: StageSpec
    signature: inspect.Signature = field(repr=False)
    merge: "Merge[Output] | None" = field(default=None, kw_only=True)
    """Makes the result of what the ranks returned; None takes that of rank 0."""
    prefetch: "Weights | None" = field(default=None, kw_only=True)
    """What is read in advance, before an instance moves to a node; None: nothing."""

    def __call__(self, *args: Inputs.args, **kwargs: Inputs.kwargs) -> Output:
        """Draw a node, or call the function: see the class."""
        current = drawing.get()
        if current is not None:
            return cast(Output, current.add(self, args, kwargs))
        if not args or not isinstance(args[0], StageContext):
            raise TypeError(
                f"stage {self.name!r} is called outside a workflow without a StageContext; for a test use"
                " onepiece.testing.stage_context()"
            )
        function: Callable[..., Any] = self.function
        return cast(Output, function(*args, **kwargs))

    @contextlib.asynccontextmanager
    async def loaded(self, context: StageContext[None]) -> AsyncIterator[State]:
        """Enter the stage's ``setup``; gives the state, None for a stage without one.

        Raises:
            DefinitionError: The setup yields never, or more than once.
        """
        if self.setup is None:
            yield cast(State, None)
            return
        steps = self.setup(context)
        try:
            try:
                state = await anext(steps)
            except StopAsyncIteration:
                raise DefinitionError(f"the setup of stage {self.name!r} yields nothing") from None
            yield state
            async for _ in steps:
                raise DefinitionError(f"the setup of stage {self.name!r} yields more than once")
        finally:
            close = getattr(steps, "aclose", None)
            if close is not None:
                await close()


@overload
def stage(function: "Body[None, Inputs, Output]", /) -> Stage[None, Inputs, Output]: ...


@overload
def stage(
    *,
    resources: Gpu | Cpu = ...,
    setup: None = ...,
    prefetch: "Weights | None" = ...,
    timeout: float | None = ...,
    instances: int = ...,
    isolation: Literal["thread", "loop", "process"] = ...,
    concurrency: int = ...,
    checkpoint: bool = ...,
    inbox: Literal["host", "device"] = ...,
    name: str | None = ...,
) -> Callable[["Body[None, Inputs, Output]"], Stage[None, Inputs, Output]]: ...


@overload
def stage(
    *,
    resources: Gpu | Cpu = ...,
    setup: "Setup[State]",
    prefetch: "Weights | None" = ...,
    timeout: float | None = ...,
    instances: int = ...,
    isolation: Literal["thread", "loop", "process"] = ...,
    concurrency: int = ...,
    checkpoint: bool = ...,
    inbox: Literal["host", "device"] = ...,
    name: str | None = ...,
) -> Callable[["Body[State, Inputs, Output]"], Stage[State, Inputs, Output]]: ...


@overload
def stage(
    *,
    resources: Gpu | Cpu,
    merge: "Merge[Output]",
    setup: None = ...,
    prefetch: "Weights | None" = ...,
    timeout: float | None = ...,
    instances: int = ...,
    isolation: Literal["thread", "loop", "process"] = ...,
    concurrency: int = ...,
    checkpoint: bool = ...,
    inbox: Literal["host", "device"] = ...,
    name: str | None = ...,
) -> Callable[["Body[None, Inputs, Output]"], Stage[None, Inputs, Output]]: ...


@overload
def stage(
    *,
    resources: Gpu | Cpu,
    merge: "Merge[Output]",
    setup: "Setup[State]",
    prefetch: "Weights | None" = ...,
    timeout: float | None = ...,
    instances: int = ...,
    isolation: Literal["thread", "loop", "process"] = ...,
    concurrency: int = ...,
    checkpoint: bool = ...,
    inbox: Literal["host", "device"] = ...,
    name: str | None = ...,
) -> Callable[["Body[State, Inputs, Output]"], Stage[State, Inputs, Output]]: ...


def stage(
    function: Any = None,
    /,
    *,
    resources: Gpu | Cpu = Cpu(),
    merge: Any = None,
    setup: Any = None,
    prefetch: Any = None,
    timeout: float | None = None,
    instances: int = 1,
    isolation: Literal["thread", "loop", "process"] = "thread",
    concurrency: int = 1,
    checkpoint: bool = False,
    inbox: Literal["host", "device"] = "host",
    name: str | None = None,
) -> Any:
    """Make a stage of an async function ``(context, inputs...) -> output``.

    Args:
        function: The function; every parameter behind the context and the result are annotated.
        resources: What one instance occupies: ``Gpu(memory_gib=40)`` or ``Cpu()``. With ``count=2`` two
            devices of one node work on each request together: a helper process for each, its rank,
            runs the function with the same inputs (``ctx.rank``, ``ctx.world_size``, ``ctx.group``).
        merge: A function that makes the result of the list of what the ranks returned, in the order of
            the ranks, whichever was first; it runs in rank 0. Without one the result is rank 0's.
        setup: An async generator function ``(context)``: loads, yields the state, unloads; for each instance.
        prefetch: A plain function ``()`` that returns the paths of what ``setup`` will read, and may block.
            Where an instance is to take another one's place, they are read while that one still serves.
        timeout: Seconds that one call may take; None leaves it to the request's deadline.
        instances: How many are wanted when nothing is known of the demand yet.
        isolation: ``"thread"`` runs the coroutine on a thread of the device's own, where it may block;
            ``"loop"`` on the node's event loop, where it must not; ``"process"`` in a helper process of the
            instance's own, which imports the stage's module itself: it may crash there, and the node lives.
        concurrency: How many calls one instance may be working on at a time.
        checkpoint: Keep what it returns on store nodes, so that the request goes on whatever nodes die.
        inbox: ``"device"``: inputs arrive in the memory of the instance's GPU, and tensors among them are
            handed over as they lie there. What the function keeps of them beyond the call, it clones.
        name: The stage's name in graphs and logs; the function's if not given.

    Raises:
        DefinitionError: The function or an argument is not what is described here.
    """

    def decorate(function: Any) -> Stage[Any, Any, Any]:
        return _define(
            function,
            name=str(name or getattr(function, "__name__", "")),
            setup=setup,
            prefetch=prefetch,
            merge=merge,
            resources=_resources(resources, function),
            timeout_seconds=timeout,
            instances=instances,
            isolation=isolation,
            concurrency=concurrency,
            checkpoint=checkpoint,
            inbox=inbox,
        )

    return decorate if function is None else decorate(function)


def _define(
    function: Any,
    *,
    name: str,
    setup: Any,
    prefetch: Any,
    merge: Any,
    resources: Resources,
    timeout_seconds: float | None,
    instances: int,
    isolation: str,
    concurrency: int,
    checkpoint: bool,
    inbox: str,
) -> Stage[Any, Any, Any]:
    where = f"stage {getattr(function, '__qualname__', function)!s}"
    check_name(name, where)
    if not inspect.iscoroutinefunction(function):
        raise DefinitionError(f"{where} must be an 'async def'; blocking code belongs in 'ctx.run(...)'")
    if setup is not None and not inspect.isasyncgenfunction(setup):
        raise DefinitionError(f"{where}: setup must be an 'async def' with one 'yield' of the state")
    if isolation not in [each.value for each in Isolation]:
        raise DefinitionError(f"{where}: isolation is {isolation!r}; 'thread', 'loop' and 'process' exist")
    if prefetch is not None and (not callable(prefetch) or inspect.iscoroutinefunction(prefetch)):
        raise DefinitionError(f"{where}: prefetch is {prefetch!r}; a plain function that returns paths")
    isolation = _check_collaboration(where, resources.count, isolation, concurrency, merge)
    if isolation == Isolation.PROCESS.value and "<locals>" in function.__qualname__:
        raise DefinitionError(
            f"{where}: a helper process imports the stage from its module; define it at the top of one"
        )
    if type(checkpoint) is not bool:
        raise DefinitionError(f"{where}: checkpoint is {checkpoint!r}; True or False")
    _check_inbox(where, inbox, resources.kind, isolation)
    _check_range(where, "instances", instances, limits.INSTANCES_MAX)
    _check_range(where, "concurrency", concurrency, limits.CONCURRENCY_MAX)
    if timeout_seconds is not None and not 0 < timeout_seconds <= limits.TIMEOUT_SECONDS_MAX:
        raise DefinitionError(
            f"{where}: timeout is {timeout_seconds!r}; seconds from 0 to {limits.TIMEOUT_SECONDS_MAX:.0f}"
        )
    signature = inspect.signature(function)
    context, *rest = signature.parameters.values() or [_NO_PARAMETER]
    _check_context(where, function, context)
    key = f"{function.__module__}:{function.__qualname__}"
    parameters = read_parameters(function, rest, where)
    _check_inbox_holds_tensors(where, inbox, parameters)
    spec = StageSpec(
        key=key,
        name=name,
        parameters=parameters,
        returns=read_returns(function, signature, where),
        resources=resources,
        timeout_seconds=None if timeout_seconds is None else float(timeout_seconds),
        instances=instances,
        isolation=Isolation(isolation),
        concurrency=concurrency,
        checkpoint=checkpoint,
        inbox=InboxMemory(inbox),
    )
    drawn = signature.replace(parameters=rest)
    return Stage(name, key, function, setup, spec, drawn, merge=merge, prefetch=prefetch)


def _check_context(where: str, function: Any, context: inspect.Parameter) -> None:
    annotation = context.annotation  # a text where the module postpones annotations
    is_context = (
        context.name in _CONTEXT_NAMES
        or annotation is context.empty
        or "Context" in (annotation if isinstance(annotation, str) else repr(annotation))
    )
    if not is_context or context.kind not in {context.POSITIONAL_ONLY, context.POSITIONAL_OR_KEYWORD}:
        raise DefinitionError(
            f"{where}: its first parameter must be the context: "
            f"async def {function.__name__}(ctx: StageContext[None], ...)"
        )


def _check_collaboration(where: str, count: int, isolation: str, concurrency: int, merge: Any) -> str:
    """Where a stage's code runs, which for one on several devices is a process for each."""
    if count == 1:
        if merge is not None:
            raise DefinitionError(
                f"{where}: merge joins what several devices return; ask for them with resources=Gpu(count=2)"
            )
        return isolation
    if merge is not None and (not callable(merge) or inspect.iscoroutinefunction(merge)):
        raise DefinitionError(f"{where}: merge is {merge!r}; a plain function of the list of partial results")
    if isolation == Isolation.LOOP.value:
        raise DefinitionError(
            f"{where}: isolation='loop' with {count} devices; each of them has a process of its own"
        )
    if concurrency > 1:
        raise DefinitionError(
            f"{where}: concurrency={concurrency} with {count} devices; they work on one request together, as"
            " the collectives of two would meet each other; give instances=... for more at a time"
        )
    return Isolation.PROCESS.value


def _check_inbox(where: str, inbox: str, kind: ResourceKind, isolation: str) -> None:
    if inbox not in [each.value for each in InboxMemory]:
        raise DefinitionError(f"{where}: inbox is {inbox!r}; 'host' and 'device' exist")
    if inbox == InboxMemory.HOST.value:
        return
    if kind is not ResourceKind.GPU:
        raise DefinitionError(
            f"{where}: inbox='device' is for stages on GPUs; give resources=Gpu(...), or leave inbox out"
        )
    if isolation == Isolation.PROCESS.value:
        raise DefinitionError(
            f"{where}: inbox='device' with a helper process, which cannot look into memory of the node's:"
            " leave out isolation='process', or inbox (stages on several devices always have them)"
        )


def _check_inbox_holds_tensors(where: str, inbox: str, parameters: Iterable[Parameter]) -> None:
    """All but torch tensors would be sent to the GPU only to be copied back."""
    if inbox == InboxMemory.DEVICE.value and not any(each.type.may_hold_torch for each in parameters):
        raise DefinitionError(
            f"{where}: inbox='device' with no parameter that can be a torch tensor; all else is copied back"
            " from the GPU, so leave inbox out, or annotate the parameter as Tensor"
        )


def _resources(needs: Any, function: Any) -> Resources:
    where = f"stage {getattr(function, '__qualname__', function)!s}"
    if not isinstance(needs, Gpu | Cpu):
        raise DefinitionError(f"{where}: resources is {needs!r}; give Gpu(memory_gib=...) or Cpu(...)")
    _check_range(where, "resources count", needs.count, limits.INSTANCES_MAX)
    if not 0 <= needs.memory_gib < limits.GIB:
        raise DefinitionError(f"{where}: memory_gib is {needs.memory_gib!r}; it counts GiB")
    kind = ResourceKind.GPU if isinstance(needs, Gpu) else ResourceKind.CPU
    return Resources(kind, round(needs.memory_gib * limits.GIB), needs.count)


def _check_range(where: str, what: str, value: int, maximum: int) -> None:
    if type(value) is not int or not 1 <= value <= maximum:
        raise DefinitionError(f"{where}: {what} is {value!r}; an int from 1 to {maximum}")


def check_name(name: str, where: str) -> None:
    """Names stand in URLs, logs and metrics; raises ``DefinitionError`` for one that cannot."""
    if not _NAME.fullmatch(name) or len(name) > limits.NAME_CHARACTERS_MAX:
        raise DefinitionError(
            f"{where}: the name {name[:200]!r} must be of letters, digits, '_', '.' and '-', begin with a"
            f" letter, and have at most {limits.NAME_CHARACTERS_MAX} characters; give one with name=..."
        )


def read_parameters(
    function: Callable[..., Any], parameters: list[inspect.Parameter], where: str
) -> tuple[Parameter, ...]:
    """The parameters of a stage or workflow as plain data; raises ``DefinitionError``."""
    if len(parameters) > limits.PARAMETERS_MAX:
        raise DefinitionError(f"{where}: more than {limits.PARAMETERS_MAX} parameters")
    return tuple(_parameter(function, each, where) for each in parameters)


def _parameter(function: Callable[..., Any], parameter: inspect.Parameter, where: str) -> Parameter:
    label = f"{where}, parameter {parameter.name!r}"
    if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY}:
        raise DefinitionError(f"{label}: *args, **kwargs and positional-only parameters have no wires")
    if parameter.annotation is parameter.empty:
        raise DefinitionError(f"{label}: it has no annotation; the types are what wiring is checked by")
    spec = type_spec(resolve(function, parameter.name, parameter.annotation), label)
    if parameter.default is parameter.empty:
        return Parameter(parameter.name, spec)
    check_constant(spec, parameter.default, f"{label}, its default")
    return Parameter(parameter.name, spec, required=False, default=parameter.default)


def read_returns(function: Callable[..., Any], signature: inspect.Signature, where: str) -> TypeSpec:
    """The return type of a stage or workflow; raises ``DefinitionError``."""
    if signature.return_annotation is signature.empty:
        raise DefinitionError(f"{where}: its result has no annotation: '-> ...'")
    return type_spec(resolve(function, "return", signature.return_annotation), f"{where}, its result")


def check_constant(spec: TypeSpec, value: Any, where: str) -> None:
    """A value written in a definition: of its type, plain, small; raises ``DefinitionError``."""
    why = check_value(spec, value)
    if why is not None:
        raise DefinitionError(f"{where}: {why}")
    writer = TreeWriter(inline_bytes_max=limits.CONTROL_BYTES_MAX)
    try:
        encode(writer.write(value, "it"), limits.CONSTANT_BYTES_MAX, "it")
    except CodecError as error:
        raise DefinitionError(
            f"{where}: {error.message}; load it in setup, or pass it as an input"
        ) from error
    if writer.buffers:
        raise DefinitionError(f"{where} is a tensor; make it in the stage's setup, or pass it as an input")
