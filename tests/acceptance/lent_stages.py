"""A stage that says, when it is loaded, how many jobs of lent devices live then."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

from onepiece import Cpu, StageContext, stage, workflow
from tests.runtime.rig import is_alive

DIRECTORY = "LENT_JOBS"
"""The variable with the directory where each job leaves a file named by its process id."""


def living(directory: Path) -> list[int]:
    """The processes of jobs that live."""
    return [int(path.name) for path in directory.iterdir() if is_alive(int(path.name))]


async def look(ctx: StageContext[None]) -> AsyncIterator[int]:
    """What is there when the stage is loaded."""
    yield len(living(Path(os.environ[DIRECTORY])))


@stage(resources=Cpu(memory_gib=0.6), setup=look)
async def looking(ctx: StageContext[int], number: int) -> int:
    """Tell."""
    return ctx.state + 0 * number


@workflow
def beside(number: int) -> int:
    """One stage."""
    return looking(number)
