"""Exit codes of ``onepiece``: what a script can do about an error, not what the error is."""

from typing import Final

from onepiece.errors import (
    ConfigError,
    DeadlineExceeded,
    DefinitionError,
    NodeUnreachable,
    Rejected,
    RequestCancelled,
    ResultGone,
    UnknownNode,
    UnknownRequest,
)
from transports.errors import AddressError, ListenFailed, UnknownScheme

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
REJECTED: Final = 3
UNREACHABLE: Final = 4
STOPPED: Final = 5
GONE: Final = 6
INTERRUPTED: Final = 130

HELP: Final = """\
exit codes:
  0    done
  1    the request failed: a stage raised, a node died, the result store is full
  2    the command, a file or a definition is wrong; nothing was sent
  3    rejected: unknown workflow, wrong input, not ready, overloaded; nothing was kept
  4    nobody answers at the server's address
  5    the request was cancelled, or its deadline passed
  6    no such request or node, or its result is gone
  130  interrupted"""


def code_of(error: BaseException) -> int:
    """The exit code that tells a script about this error."""
    match error:
        case (
            ConfigError() | DefinitionError() | AddressError() | UnknownScheme() | ListenFailed() | OSError()
        ):
            return USAGE
        case Rejected():
            return REJECTED
        case NodeUnreachable():
            return UNREACHABLE
        case RequestCancelled() | DeadlineExceeded():
            return STOPPED
        case UnknownRequest() | UnknownNode() | ResultGone():
            return GONE
        case _:
            return FAILED
