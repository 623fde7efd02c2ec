"""The smallest workflow: one stage that shouts back what it is told."""

from onepiece import StageContext, stage, workflow


@stage
async def shout(ctx: StageContext[None], text: str) -> str:
    """Say it louder."""
    return f"{text.upper()}!"


@workflow
def echo(text: str) -> str:
    """Answer with the same text, louder."""
    return shout(text)
