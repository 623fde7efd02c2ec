"""Whether there is a libucp to test with."""

import pytest

from transports._libucp import UcpMissingError, load


def _missing() -> str | None:
    try:
        load()
    except UcpMissingError as missing:
        return str(missing)
    return None


needs_libucp = pytest.mark.skipif(_missing() is not None, reason=f"no libucp: {_missing()}")
