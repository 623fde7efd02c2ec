"""Stages that fail with errors which are themselves trouble, on each kind of isolation."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NoReturn

import onepiece
from onepiece import StageContext, stage, workflow

MUCH: Final = 5_000_000
SETUP_FAULT: Final = "FAILING_STAGES_SETUP"


class Mute(Exception):  # noqa: N818 - named by what is wrong with it
    """Cannot be shown."""

    def __str__(self) -> NoReturn:
        raise RuntimeError("no str")

    __repr__ = __str__


class Noted(Exception):  # noqa: N818 - named by what is wrong with it
    """Its traceback cannot be formatted."""

    def __getattribute__(self, name: str) -> Any:
        """Like a property that raises."""
        if name == "__notes__":
            raise SystemExit(1)
        return super().__getattribute__(name)


class Poor(onepiece.InvalidInput):
    """Has a constructor of its own, which leaves out what errors have."""

    def __init__(self, colour: str) -> None:
        self.colour = colour

    def to_wire(self) -> NoReturn:
        """Not as it should be."""
        raise RuntimeError("no wire")


class Coloured(onepiece.InvalidInput):
    """Has a constructor of its own, as is proper."""

    def __init__(self, colour: str) -> None:
        super().__init__(f"no such colour: {colour}", field="colour", colour=colour)


class Silent:
    """A value that cannot be shown."""

    def __repr__(self) -> NoReturn:
        raise ValueError("no repr")


def circle() -> list[Any]:
    """A list that holds itself."""
    found: list[Any] = []
    found.append(found)
    return found


FAULTS: Final[dict[str, Callable[[], BaseException]]] = {
    "mute": Mute,
    "notes": Noted,
    "much": lambda: ValueError("x" * MUCH),
    "lines": lambda: ValueError("x\n" * (MUCH // 2)),
    "much rejected": lambda: onepiece.InvalidInput("b" * MUCH),
    "object": lambda: onepiece.InvalidInput("bad thing", field=object()),
    "silent": lambda: onepiece.StageFailed("bad thing", field=Silent()),
    "many": lambda: onepiece.InvalidInput("bad thing", **{f"field{n}": "y" * 1000 for n in range(5000)}),
    "deep": lambda: onepiece.InvalidInput("bad thing", field=circle(), keys={(1, 2): 1 << 100}),
    "no text": lambda: onepiece.InvalidInput(object()),  # type: ignore[arg-type]  # what is tested
    "soon": lambda: onepiece.NotReady("bad thing", retry_after_seconds="soon"),
    "poor": lambda: Poor("red"),
    "coloured": lambda: Coloured("red"),
    "surrogate": lambda: ValueError("\udc80" * MUCH),
    "group": lambda: ExceptionGroup("several", [KeyError("one"), Mute(), ValueError("x" * MUCH)]),
    "iteration": lambda: StopIteration("enough"),
    "cancelled": lambda: asyncio.CancelledError("by myself"),
}


async def fail(ctx: StageContext[Any], fault: str) -> int:
    """Fail, report or return what is trouble."""
    if fault == "value":
        wrong: Any = Silent()
        return wrong  # type: ignore[no-any-return]  # what is tested
    if fault == "report":
        ctx.report(loss=1.0, thing=object())
    if fault == "report much":
        ctx.report(text="y" * MUCH)
    if fault in FAULTS:
        make = FAULTS[fault]
        raise make()
    return 1


@stage
async def on_thread(ctx: StageContext[None], fault: str) -> int:
    """In the node, on a thread."""
    return await fail(ctx, fault)


@stage(isolation="loop")
async def on_loop(ctx: StageContext[None], fault: str) -> int:
    """In the node, on its loop."""
    return await fail(ctx, fault)


@stage(isolation="process")
async def in_process(ctx: StageContext[None], fault: str) -> int:
    """In a process of its own."""
    return await fail(ctx, fault)


async def set_up(ctx: StageContext[None]) -> AsyncIterator[int]:
    """Fail as the environment says, which is that of helper processes too."""
    yield await fail(ctx, os.environ[SETUP_FAULT])


@stage(setup=set_up)
async def loaded_on_thread(ctx: StageContext[int], fault: str) -> int:
    """In the node, on a thread."""
    return await fail(ctx, fault)


@stage(setup=set_up, isolation="loop")
async def loaded_on_loop(ctx: StageContext[int], fault: str) -> int:
    """In the node, on its loop."""
    return await fail(ctx, fault)


@stage(setup=set_up, isolation="process")
async def loaded_in_process(ctx: StageContext[int], fault: str) -> int:
    """In a process of its own."""
    return await fail(ctx, fault)


@workflow
def thread_flow(fault: str) -> int:
    """Of one stage."""
    return on_thread(fault)


@workflow
def process_flow(fault: str) -> int:
    """Of one stage."""
    return in_process(fault)
