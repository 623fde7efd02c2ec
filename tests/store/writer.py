"""A process that stores results for ever and says which were acknowledged; tests kill it.

Usage: writer.py DIRECTORY FIRST_NUMBER
"""

import asyncio
import sys

from onepiece.store import PutOutcome, ResultStore, StoreOptions

OPTIONS = StoreOptions(byte_budget=256 << 20, chunk_bytes=65536, transaction_bytes=131072)
NOW = 1_000_000.0


def value_of(number: int) -> bytes:
    """What is stored under a number; every third value takes several transactions."""
    return number.to_bytes(8, "big") * (50_000 if number % 3 == 0 else 500)


async def main(directory: str, first: int) -> None:
    """Store one result after the other; purge every fifth when it is acknowledged."""
    async with ResultStore.open(directory, OPTIONS) as store:
        for number in range(first, sys.maxsize):
            uid = f"u{number}"
            outcome = await store.put(uid, [value_of(number)], content_type="x", now=NOW)
            assert outcome is PutOutcome.STORED, outcome
            sys.stdout.write(f"stored {number}\n")
            if number % 5 == 0:
                await store.purge(uid, NOW)
                sys.stdout.write(f"purged {number}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
