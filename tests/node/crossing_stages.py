"""Workflows whose ways cross, in the process of the tests: what fills one inbox waits for room in another."""

from onepiece import StageContext, stage, workflow


@stage(isolation="loop")
async def left(ctx: StageContext[None], text: str) -> str:
    """One side."""
    return f"{text}<"


@stage(isolation="loop")
async def right(ctx: StageContext[None], text: str) -> str:
    """The other side."""
    return f"{text}>"


@stage(isolation="loop")
async def join(ctx: StageContext[None], one: str, other: str) -> str:
    """Both sides again."""
    return f"{one}{other[-1]}"


@workflow
def eastward(text: str) -> str:
    """From left to right."""
    return right(left(text))


@workflow
def westward(text: str) -> str:
    """The opposite way through the same two actors."""
    return left(right(text))


@workflow
def circle(text: str) -> str:
    """An actor that sends to itself."""
    return left(left(left(text)))


@workflow
def there_and_back(text: str) -> str:
    """Two actors that send to each other."""
    return left(right(left(text)))


@workflow
def diamond(text: str) -> str:
    """A fork and a join."""
    begun = left(text)
    return join(left(begun), right(begun))
