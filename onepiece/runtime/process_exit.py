"""How a process has ended, in words."""

import signal


def described_exit(status: int) -> str:
    """Of a status as ``subprocess`` has it: negative for a signal."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    by_whom = " (by the kernel, if memory ran out)" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{by_whom}"
