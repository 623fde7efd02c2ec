"""A stage with two instances that holds some requests until it is let go, in the process of the tests."""

import asyncio

from onepiece import StageContext, stage, workflow

let_go = asyncio.Event()


def reset() -> None:
    """For a test of its own."""
    global let_go  # noqa: PLW0603 - it belongs to the test's loop
    let_go = asyncio.Event()


@stage(isolation="loop")
async def passing(ctx: StageContext[None], is_held: bool) -> bool:
    """Pass it on."""
    return is_held


@stage(isolation="loop", instances=2)
async def holding(ctx: StageContext[None], is_held: bool) -> str:
    """Wait if that is asked for."""
    if is_held:
        await let_go.wait()
    return "done"


@stage(isolation="loop", instances=2)
async def meeting(ctx: StageContext[None], is_held: bool, other: bool) -> str:
    """The same behind two stages."""
    if is_held:
        await let_go.wait()
    return "done"


@workflow
def at_once(is_held: bool) -> str:
    """The proxy chooses the instance."""
    return holding(is_held)


@workflow
def behind(is_held: bool) -> str:
    """The node of the stage before it does."""
    return holding(passing(is_held))


@workflow
def joined(is_held: bool) -> str:
    """The proxy chooses where the outputs of two stages meet."""
    return meeting(passing(is_held), passing(is_held))
