"""Whether this process can still open anything: a server without file descriptors accepts no connection."""

from typing import Final

from transports.free_descriptors import who_is_out_of_descriptors

_WANTED: Final = 8
"""As many must be free: a connection that is accepted mostly opens something for its request, too."""


def why_none_are_left() -> str:
    """What is wrong, in words, if this process is out of file descriptors, or nearly; else ""."""
    starved = who_is_out_of_descriptors(_WANTED)
    if not starved:
        return ""
    return (
        f"{starved}, and connections are not accepted: raise the limit (ulimit -n), or spread clients over "
        "more proxies"
    )
