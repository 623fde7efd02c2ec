"""``python -m onepiece.node``: run one node of a set."""

import sys
from collections.abc import Sequence

from onepiece.errors import ConfigError, DefinitionError, OnePieceError
from onepiece.log import configure
from onepiece.node.loop import run_on_node_loop
from onepiece.node.node import run_node
from onepiece.node.options import NodeOptions, read_options
from onepiece.node.stopping import STOPPED_AT_ONCE, StopSignal, watch_signals
from transports import AddressError, ListenFailed, TransportError, UnknownScheme


def main(argv: Sequence[str] | None = None) -> int:
    """Run a node with command-line arguments; returns its exit status."""
    if not __debug__:
        _say("it relies on its assertions: run it without -O")
        return 2
    try:
        options = read_options(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        _say(error.message)
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
        if not run_on_node_loop(run()):
            status = 1
    except* ListenFailed as errors:
        _say(_first(errors))
        status = 3
    except* (OnePieceError, TransportError) as errors:
        first = _first(errors)
        _say(first)
        status = 2 if isinstance(first, ConfigError | DefinitionError | AddressError | UnknownScheme) else 1
    return STOPPED_AT_ONCE if stop.now.is_set() else status


def _say(what: object) -> None:
    sys.stderr.write(f"onepiece.node: {what}\n")


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that is no group."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


if __name__ == "__main__":
    sys.exit(main())
