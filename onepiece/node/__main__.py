"""``python -m onepiece.node``: run one node of a set."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from onepiece.errors import ConfigError, OnePieceError
from onepiece.log import configure
from onepiece.node.node import StopSignal, run_node
from onepiece.node.options import NodeOptions, read_options
from transports import ListenFailed, TransportError

_STOPPED_AT_ONCE: Final = 130
_LAST_SECONDS: Final = 3.0


@contextlib.contextmanager
def watch_signals(stop: StopSignal) -> Iterator[None]:
    """Let SIGTERM and SIGINT ask the node to stop; the second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.drain.is_set():
            watchdog = threading.Timer(_LAST_SECONDS, os._exit, [_STOPPED_AT_ONCE])
            watchdog.daemon = True
            watchdog.start()  # a thread that hangs must not keep us
        stop.request()

    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a node with command-line arguments; returns its exit status."""
    if not __debug__:
        print("onepiece relies on its assertions: run it without -O", file=sys.stderr)  # noqa: T201
        return 2
    try:
        options = read_options(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"onepiece.node: {error.message}", file=sys.stderr)  # noqa: T201
        return 2
    configure("json" if options.log_json else "text", options.log_level)

    return _run(options)


def _run(options: NodeOptions) -> int:
    stop = StopSignal()

    async def run() -> bool:
        with watch_signals(stop):
            return await run_node(options, stop)

    status = 0
    try:
        if not asyncio.run(run()):
            status = 1
    except* ListenFailed as errors:
        print(f"onepiece.node: {_first(errors)}", file=sys.stderr)  # noqa: T201
        status = 3
    except* (OnePieceError, TransportError) as errors:
        print(f"onepiece.node: {_first(errors)}", file=sys.stderr)  # noqa: T201
        status = 1
    return _STOPPED_AT_ONCE if stop.now.is_set() else status


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that is no group."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


if __name__ == "__main__":
    sys.exit(main())
