"""What all tests share."""

import logging
import signal
from collections.abc import Iterator

import pytest
import structlog


def pytest_configure() -> None:
    """Let Ctrl-C reach the processes that tests start, also where a shell runs the tests in the background.

    Such a shell has them ignore it, and children would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Logging belongs to the process: a test that sets it up leaves it as it was."""
    root = logging.getLogger()
    handlers, level, before = list(root.handlers), root.level, structlog.get_config()
    yield
    structlog.configure(**before)
    root.handlers[:] = handlers
    root.setLevel(level)
