"""A workflow of three stages that count their runs, two actors each, in the process of the tests."""

from collections import Counter
from collections.abc import Awaitable, Callable

from onepiece import StageContext, stage, workflow

STAGES = ("draw", "refine", "render")
runs: Counter[str] = Counter()
"""How often each stage began, of all requests since the test cleared it."""
hooks: dict[str, Callable[[str], Awaitable[None]]] = {}
"""What a stage waits for, given its node's name; by stage."""


async def _run(ctx: StageContext[None], name: str) -> None:
    runs[name] += 1
    if name in hooks:
        await hooks[name](ctx.node)


@stage(isolation="loop", instances=2)
async def draw(ctx: StageContext[None], text: str) -> str:
    """The first stage."""
    await _run(ctx, "draw")
    return f"{text}, drawn"


@stage(isolation="loop", instances=2)
async def refine(ctx: StageContext[None], picture: str) -> str:
    """The stage that sends over the hop."""
    await _run(ctx, "refine")
    return f"{picture}, refined"


@stage(isolation="loop", instances=2, checkpoint=True, name="refine")
async def refine_kept(ctx: StageContext[None], picture: str) -> str:
    """The same, and store nodes keep what it sends."""
    return await refine.function(ctx, picture)


@stage(isolation="loop", instances=2)
async def render(ctx: StageContext[None], picture: str) -> str:
    """The stage that receives over the hop."""
    await _run(ctx, "render")
    return f"{picture}, rendered"


@workflow
def film(text: str) -> str:
    """Three stages in a row."""
    return render(refine(draw(text)))


@workflow
def film_kept(text: str) -> str:
    """The same with a checkpoint in the middle."""
    return render(refine_kept(draw(text)))
