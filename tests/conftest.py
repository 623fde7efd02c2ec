"""What all tests share."""

import signal


def pytest_configure() -> None:
    """Let Ctrl-C reach the processes that tests start, also where a shell runs the tests in the background.

    Such a shell has them ignore it, and children would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
