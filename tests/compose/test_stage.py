"""Stages: what their definition is checked for, and that they stay plain functions."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from onepiece import Cpu, DefinitionError, Gpu, StageContext, Tensor, stage
from onepiece.graph import Isolation, ResourceKind, Resources
from onepiece.testing import stage_context


@stage
async def double(ctx: StageContext[None], x: int, *, times: int = 2) -> int:
    """Multiply."""
    ctx.report(step=1, total=1)
    return x * times


async def load(ctx: StageContext[None]) -> AsyncIterator[list[str]]:
    """Load and unload, and leave traces."""
    events = ["loaded"]
    try:
        yield events
    finally:
        events.append("unloaded")


@stage(
    resources=Gpu(memory_gib=1.5),
    setup=load,
    timeout=60,
    instances=3,
    isolation="loop",
    concurrency=4,
)
async def loaded(ctx: StageContext[list[str]], image: Tensor) -> Tensor:
    """Use the state."""
    ctx.state.append("used")
    return image


def sum_of(parts: list[int]) -> int:
    """Of all ranks."""
    return sum(parts)


@stage(resources=Gpu(memory_gib=1.5, count=2), merge=sum_of)
async def shared(ctx: StageContext[None], x: int) -> int:
    """Each rank does its part."""
    return x // ctx.world_size


def test_a_bare_stage_has_the_defaults() -> None:
    """One thread-bound call at a time on a processor, no timeout, named after its function."""
    spec = double.spec
    assert (spec.name, spec.key) == ("double", f"{__name__}:double")
    assert spec.signature == "double(x: int, times: int = 2) -> int"
    assert spec.resources == Resources(ResourceKind.CPU, 0, 1)
    assert (spec.timeout_seconds, spec.instances, spec.concurrency) == (None, 1, 1)
    assert spec.isolation is Isolation.THREAD


def test_a_stage_states_its_needs() -> None:
    """What the decorator is told is in the spec, in base units."""
    spec = loaded.spec
    assert spec.resources == Resources(ResourceKind.GPU, 3 << 29, 1)
    assert (spec.timeout_seconds, spec.instances, spec.concurrency) == (60.0, 3, 4)
    assert spec.isolation is Isolation.LOOP
    assert not spec.is_collaborative


def test_a_stage_on_several_devices_has_a_process_for_each() -> None:
    """The memory is that of each device; one request at a time has them all."""
    spec = shared.spec
    assert spec.resources == Resources(ResourceKind.GPU, 3 << 29, 2)
    assert spec.is_collaborative
    assert spec.isolation is Isolation.PROCESS
    assert shared.merge is sum_of
    assert loaded.merge is None


async def test_a_context_of_one_device_has_no_group() -> None:
    """The same body runs on one device and on several."""
    context = stage_context()
    assert (context.rank, context.world_size, context.group) == (0, 1, None)
    assert await shared.function(context, 4) == 4


async def test_a_stage_is_the_plain_function_outside_workflows() -> None:
    """A unit test calls it with a context, which records what it reports."""
    context = stage_context()
    assert await double.function(context, 4, times=3) == 12
    assert context.reports == [{"step": 1, "total": 1}]


async def test_a_stage_can_be_called_like_its_function() -> None:
    """Beside ``function``, for those without a type checker."""
    called: Any = double
    assert await called(stage_context(), 4) == 8


async def test_a_stage_called_without_a_context_says_what_is_missing() -> None:
    """The mistake of calling a stage like a function outside a workflow."""
    with pytest.raises(TypeError, match=r"onepiece\.testing\.stage_context"):
        double(4)


async def test_setup_surrounds_the_calls() -> None:
    """The state is there while the stage is loaded, and unloaded behind it, an error or not."""
    async with loaded.loaded(stage_context()) as state:
        await loaded.function(stage_context(state), np.ones(1))
        assert state == ["loaded", "used"]
    assert state == ["loaded", "used", "unloaded"]
    with pytest.raises(ZeroDivisionError):
        async with loaded.loaded(stage_context()) as state:
            raise ZeroDivisionError
    assert state == ["loaded", "unloaded"]
    async with double.loaded(stage_context()) as nothing:
        assert nothing is None


async def test_setup_must_yield_once() -> None:
    """A setup that yields never or twice is a definition error, and is closed."""

    async def never(ctx: StageContext[None]) -> AsyncIterator[int]:
        if ctx.uid == "x":
            yield 1

    async def twice(ctx: StageContext[None]) -> AsyncIterator[int]:
        yield 1
        yield 2

    for setup, words in ((never, "yields nothing"), (twice, "more than once")):

        @stage(setup=setup)
        async def uses(ctx: StageContext[int], x: int) -> int:
            return x

        with pytest.raises(DefinitionError, match=words):
            async with uses.loaded(stage_context()):
                pass


def not_async(ctx: Any, x: int) -> int:
    """Not a coroutine function."""
    return x


async def forgotten_context(text: str) -> str:
    """Its first parameter is an input."""
    return text


async def no_context() -> int:
    """No parameters at all."""
    return 1


async def no_annotation(ctx, x) -> int:  # type: ignore[no-untyped-def]  # what is tested  # noqa: ANN001
    """A parameter without a type."""
    return 1


async def no_result(ctx: Any, x: int):  # type: ignore[no-untyped-def]  # what is tested  # noqa: ANN201
    """A result without a type."""


async def variadic(ctx: Any, *_xs: int) -> int:
    """Any number of parameters."""
    return 1


async def keywords(ctx: Any, **_xs: int) -> int:
    """Any parameters by name."""
    return 1


async def positional(ctx: Any, x: int, /) -> int:
    """A parameter without a usable name."""
    return 1


async def wrong_default(ctx: Any, x: int = "1") -> int:  # type: ignore[assignment]  # what is tested
    """A default of another type."""
    return 1


async def tensor_default(ctx: Any, x: Tensor = np.ones(2)) -> int:  # noqa: B008 - what is tested
    """A default that cannot be part of a graph."""
    return 1


async def large_default(ctx: Any, x: str = "x" * 100_000) -> int:
    """A default that is too large to be part of a graph."""
    return 1


async def unknown_type(ctx: Any, x: "Nowhere") -> int:  # type: ignore[name-defined]  # noqa: F821 - what is tested
    """An annotation that cannot be evaluated."""
    return 1


async def unfit_type(ctx: Any, x: set[int]) -> int:
    """An annotation of a type that cannot travel."""
    return 1


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (not_async, "must be an 'async def'"),
        (no_context, r"first parameter must be the context: async def no_context\(ctx: "),
        (forgotten_context, r"first parameter must be the context"),
        (no_annotation, "parameter 'x': it has no annotation"),
        (no_result, "its result has no annotation"),
        (variadic, r"\*args"),
        (keywords, r"\*\*kwargs"),
        (positional, "positional-only"),
        (wrong_default, "parameter 'x', its default: the str '1' where int is wanted"),
        (tensor_default, "its default is a tensor"),
        (large_default, "at most 16384"),
        (unknown_type, "annotation 'Nowhere' of 'x' cannot be read"),
        (unfit_type, r"set\[int\] cannot travel"),
        (lambda ctx: 1, "name '<lambda>'"),
    ],
)
def test_a_wrong_function_is_refused(function: Callable[..., Any], words: str) -> None:
    """At its definition, with the stage and the parameter named."""
    with pytest.raises(DefinitionError, match=words) as caught:
        stage(function)
    assert getattr(function, "__qualname__", "") in caught.value.message


async def not_plain(parts: list[int]) -> int:
    """A merge must not wait."""
    return sum(parts)


decorate: Any = stage
"""Without its types: the options below are wrong on purpose."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"instances": 0}, "instances is 0"),
        ({"instances": 1.5}, r"instances is 1\.5"),
        ({"concurrency": True}, "concurrency is True"),
        ({"concurrency": 1 << 40}, "from 1 to 1024"),
        ({"isolation": "fiber"}, "'thread', 'loop' and 'process' exist"),
        ({"resources": "gpu"}, r"give Gpu\(memory_gib=...\)"),
        ({"resources": Gpu(memory_gib=-1)}, "memory_gib is -1"),
        ({"resources": Gpu(memory_gib=40 << 30)}, "it counts GiB"),
        ({"resources": Cpu(count=0)}, "count is 0"),
        ({"merge": sum_of}, r"ask for them with resources=Gpu\(count=2\)"),
        ({"resources": Cpu(count=2), "merge": 3}, "merge is 3; a plain function"),
        ({"resources": Cpu(count=2), "merge": not_plain}, "a plain function of the list"),
        ({"resources": Cpu(count=2), "isolation": "loop"}, "each of them has a process of its own"),
        ({"resources": Gpu(count=2), "concurrency": 2}, "they work on one request together"),
        ({"resources": Gpu(count=2)}, "define it at the top of one"),
        ({"setup": not_async}, "setup must be an 'async def' with one 'yield'"),
        ({"prefetch": "weights.safetensors"}, "a plain function that returns paths"),
        ({"prefetch": unfit_type}, "a plain function that returns paths"),
        ({"name": "no spaces"}, "the name 'no spaces'"),
        ({"name": "x" * 200}, "at most 128 characters"),
        ({"name": "@inputs"}, "the name '@inputs'"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], words: str) -> None:
    """Each option has a range, which the error names."""

    async def plain(ctx: StageContext[None], x: int) -> int:
        return x

    with pytest.raises(DefinitionError, match=words):
        decorate(**options)(plain)
