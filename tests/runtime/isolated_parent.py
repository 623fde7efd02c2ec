"""``python -m tests.runtime.isolated_parent HOW``: a process with helpers at work; prints their ids."""

import asyncio
import sys

from onepiece.runtime.rank_group import RankGroup
from tests.runtime.isolated_stages import linger
from tests.runtime.ranked_stages import stumble
from tests.runtime.rig import rig, until


async def main(how: str) -> None:
    """Run until killed."""
    async with rig(stumble if how == "ranks" else linger) as rigged:
        call = rigged.start(fault="block") if how == "ranks" else rigged.start(how=how)
        await until(lambda: rigged.progress)
        is_group = isinstance(rigged.state, RankGroup)
        processes = rigged.state.process_ids if is_group else [rigged.process.process_id]
        sys.stdout.write(" ".join(map(str, processes)) + "\n")
        sys.stdout.flush()
        await call.task


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
