"""A process that keeps records of requests for ever and says which were acknowledged; tests kill it.

Usage: log_writer.py DIRECTORY FIRST_NUMBER
"""

import asyncio
import sys

from onepiece.store import LogEntry, RequestLog, StoreOptions

NOW = 1_000_000.0


def entry_of(number: int) -> LogEntry:
    """The entry of a number."""
    return LogEntry(f"u{number}", "movie", "proxy-1.1", "tcp://a/control", f"key {number}", NOW, NOW + 60, 0)


def body_of(number: int) -> bytes:
    """Its inputs; every third takes several pieces."""
    return number.to_bytes(8, "big") * (40_000 if number % 3 == 0 else 50)


async def main(directory: str, first: int) -> None:
    """Keep one record after the other; every fourth is adopted, every fifth removed."""
    async with RequestLog.open(directory, StoreOptions(chunk_bytes=65536)) as log:
        for number in range(first, sys.maxsize):
            assert await log.put(entry_of(number), [body_of(number)], NOW) == f"u{number}"
            sys.stdout.write(f"kept {number}\n")
            if number % 4 == 0:
                assert await log.adopt(f"u{number}", "proxy-2.1", "tcp://b/control", 1)
                sys.stdout.write(f"adopted {number}\n")
            if number % 5 == 0:
                assert await log.remove(f"u{number}", NOW)
                sys.stdout.write(f"removed {number}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
