"""The virtual machine's two devices, as tests use them."""

from typing import Final

from transports.address import Address
from transports.memory import Options
from transports.registry import transport_for
from transports.testing import Setting

OWNERS: Final = "device=rxe0"
PRODUCERS: Final = "device=rxe1"


PATIENT: Final = Options(secret=b"of this cluster", connect_timeout_seconds=60.0)
"""The first session imports what it needs, which takes its time under emulation."""


def verbs() -> Setting:
    """A free port, and memory behind rxe0."""
    address = Address.parse(f"verbs://127.0.0.1:0?{OWNERS}")
    return Setting(transport_for("verbs"), address, PATIENT)
