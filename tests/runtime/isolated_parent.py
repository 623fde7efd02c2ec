"""``python -m tests.runtime.isolated_parent HOW``: a process with a helper that is at work; prints its id."""

import asyncio
import sys

from tests.runtime.isolated_stages import linger
from tests.runtime.rig import rig, until


async def main(how: str) -> None:
    """Run until killed."""
    async with rig(linger) as rigged:
        call = rigged.start(how=how)
        await until(lambda: rigged.progress)
        sys.stdout.write(f"{rigged.process.process_id}\n")
        sys.stdout.flush()
        await call.task


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
