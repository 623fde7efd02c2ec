"""``onepiece bench memory``: whether a node's memory stays flat while requests come and go.

One node with all roles, in a process of its own; three stages that do nothing. So many requests are kept
in flight, some of which are cancelled. What the node's process occupies is read now and then: its own memory
(``anonymous``), which must not grow for ever, and pages of files (``file`` and ``shared``: libraries, and
what the result store keeps on disk or in memory), which the kernel takes back when it needs them.

A ring takes memory where messages have been, and goes round: the inbox of each actor, and the result
store's, grow to ``--inbox-bytes`` as messages first come by, and no further. Here they are small, so that
they are soon full-grown and what else grows can be seen.

The *slope* is that of a straight line through the second half of the samples, in bytes per request. By then
the node has as many records of ended requests as it keeps, if that many requests were sent.
"""

import argparse
import asyncio
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import asdict, define, frozen

import onepiece
from onepiece.cli.bench_node import ends_with_sigterm, serving_node
from onepiece.cli.bench_stages import through_loop
from onepiece.client import Client
from onepiece.errors import OnePieceError, RequestCancelled
from onepiece.limits import RECORDS_MAX
from onepiece.log import configure

_WORKFLOW: Final = "onepiece.cli.bench_stages:through_loop"
_REQUESTS: Final = 2 * RECORDS_MAX
_INBOX_BYTES: Final = 1 << 20
_WIDTH: Final = 11
_TITLES: Final = ("requests", "seconds", "anonymous", "file", "shared", "on disk")
_REQUEST_SECONDS: Final = 60.0
_KINDS: Final = {"anonymous": "RssAnon", "file": "RssFile", "shared": "RssShmem"}


@frozen
class Sample:
    """What the node occupied when so many requests had ended, in bytes."""

    requests: int
    seconds: float
    anonymous: int
    file: int
    shared: int
    disk: int
    """What its state directory occupies on the disk."""


@define
class Load:
    """What became of the requests."""

    finished: int = 0
    cancelled: int = 0
    failed: int = 0

    @property
    def ended(self) -> int:
        """All of them."""
        return self.finished + self.cancelled + self.failed


def read_status(text: str) -> dict[str, int]:
    """The kinds of resident memory in ``/proc/PID/status``, in bytes."""
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {kind: int(lines[name].split()[0]) * 1024 for kind, name in _KINDS.items()}


def slope(samples: Sequence[Sample]) -> float:
    """Bytes of own memory per request, of a line through the second half; 0.0 for less than two samples."""
    half = samples[len(samples) // 2 :]
    if len(half) < 2:
        return 0.0
    mean_x = sum(each.requests for each in half) / len(half)
    mean_y = sum(each.anonymous for each in half) / len(half)
    above = sum((each.requests - mean_x) * (each.anonymous - mean_y) for each in half)
    below = sum((each.requests - mean_x) ** 2 for each in half)
    return above / below if below else 0.0


async def measure(
    requests: int,
    *,
    cancelled_share: float,
    in_flight: int,
    payload_bytes: int,
    inbox_bytes: int,
    samples: int,
    tell: Callable[[Sample], None],
) -> tuple[list[Sample], Load]:
    """Run the load against a node of its own, and sample that.

    Args:
        requests: How many to send.
        cancelled_share: How many of them to cancel, 0 to 1.
        in_flight: How many at a time.
        payload_bytes: What each passes through the stages.
        inbox_bytes: The payload ring of each of the node's inboxes.
        samples: How many to take, evenly.
        tell: Called with each as it is taken.

    Raises:
        RuntimeError: The node did not start, or has ended.
    """
    inboxes = ("--inbox-bytes", str(inbox_bytes))
    async with serving_node(_WORKFLOW, through_loop, b"", *inboxes) as (process, url, directory):
        load, found, started = Load(), [], time.monotonic()

        def sample() -> None:
            status = read_status(Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8"))
            seconds = time.monotonic() - started
            found.append(Sample(requests=load.ended, seconds=seconds, disk=_occupied(directory), **status))
            tell(found[-1])

        async with onepiece.connect(url) as client:
            every = max(1, requests // samples)
            numbers = iter(range(requests))

            async def keep_busy() -> None:
                for number in numbers:
                    is_cancelled = int((number + 1) * cancelled_share) > int(number * cancelled_share)
                    await _request(client, bytes(payload_bytes), load, is_cancelled=is_cancelled)
                    if load.ended % every == 0:
                        sample()

            await _request(client, bytes(payload_bytes), Load(), is_cancelled=False)
            sample()
            async with asyncio.TaskGroup() as slots:
                for _ in range(in_flight):
                    slots.create_task(keep_busy())
        return found, load


async def _request(client: Client, payload: bytes, load: Load, *, is_cancelled: bool) -> None:
    request = await client.submit(through_loop(payload), timeout=_REQUEST_SECONDS)
    try:
        if is_cancelled:
            await request.cancel()
        await request.result()
        load.finished += 1
    except RequestCancelled:
        load.cancelled += 1
    except OnePieceError as error:
        load.failed += 1
        print(f"request {request.uid} failed: {error}", file=sys.stderr)


def _occupied(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def line_of(sample: Sample) -> str:
    """One sample, sizes in MiB."""
    sizes = (sample.anonymous, sample.file, sample.shared, sample.disk)
    numbers = [f"{sample.requests}", f"{sample.seconds:.0f}", *(f"{size / (1 << 20):.1f}" for size in sizes)]
    return "".join(number.rjust(_WIDTH) for number in numbers)


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    arguments = argparse.ArgumentParser(
        prog="onepiece bench memory", description=(__doc__ or "").partition("\n")[0]
    )
    arguments.add_argument("--requests", type=int, default=_REQUESTS, help="how many (%(default)s)")
    arguments.add_argument("--cancelled", type=float, default=0.1, help="share of them (%(default)s)")
    arguments.add_argument("--in-flight", type=int, default=16, help="at a time (%(default)s)")
    arguments.add_argument("--payload-bytes", type=int, default=1024, help="of each (%(default)s)")
    arguments.add_argument(
        "--inbox-bytes", type=int, default=_INBOX_BYTES, help="of each inbox of the node (%(default)s)"
    )
    arguments.add_argument("--samples", type=int, default=20, help="lines of the table (%(default)s)")
    arguments.add_argument("--json", action="store_true", help="an object with `samples` on standard output")
    return arguments


def run(argv: list[str]) -> int:
    """Measure and print; the exit status is 1 if a request failed."""
    options = parser().parse_args(argv)
    configure(level="warning")

    def tell(sample: Sample) -> None:
        if not options.json:
            print(line_of(sample), flush=True)

    if not options.json:
        print(f"{platform.machine()}, Python {platform.python_version()}; sizes in MiB")
        print("".join(title.rjust(_WIDTH) for title in _TITLES))
    with ends_with_sigterm():
        samples, load = asyncio.run(
            measure(
                options.requests,
                cancelled_share=options.cancelled,
                in_flight=options.in_flight,
                payload_bytes=options.payload_bytes,
                inbox_bytes=options.inbox_bytes,
                samples=options.samples,
                tell=tell,
            )
        )
    found: dict[str, Any] = {**asdict(load), "slope_bytes_per_request": round(slope(samples), 1)}
    if options.json:
        print(json.dumps({**found, "samples": [asdict(sample) for sample in samples]}, indent=2))
    else:
        print(", ".join(f"{name}: {value}" for name, value in found.items()))
    return 1 if load.failed else 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
