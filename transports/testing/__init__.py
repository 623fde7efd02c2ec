"""What every transport has to pass, and wires that misbehave. Public: for third parties' transports.

A *maker* returns a fresh ``Setting`` each time: the transport, an address to listen on, options. In
a test suite, one line per transport and one test per check::

    @pytest.mark.parametrize("check", REMOTE_MEMORY_CHECKS, ids=lambda check: check.__name__)
    async def test_remote_memory(check):
        await check(Setting(CarrierTransport(), Address.parse("pigeon://loft")))

``check_remote_memory`` and ``check_channel`` run all of them. A check raises ``AssertionError``; its
docstring says what must hold.
"""

from transports.testing.channel_checks import CHANNEL_CHECKS
from transports.testing.channel_fault_checks import CHANNEL_FAULT_CHECKS
from transports.testing.claim_checks import CLAIM_CHANNEL_CHECKS, CLAIM_CHECKS
from transports.testing.device_checks import DEVICE_CHECKS
from transports.testing.fake_device import FakeDevice
from transports.testing.faults import Faults, FaultyTransport
from transports.testing.large_checks import LARGE_CHANNEL_CHECKS, LARGE_MEMORY_CHECKS
from transports.testing.memory_checks import REMOTE_MEMORY_CHECKS
from transports.testing.session_checks import SESSION_CHECKS
from transports.testing.setting import Check, Maker, Setting, until

ALL_REMOTE_MEMORY_CHECKS: tuple[Check, ...] = (
    *REMOTE_MEMORY_CHECKS,
    *CLAIM_CHECKS,
    *SESSION_CHECKS,
    *LARGE_MEMORY_CHECKS,
)
"""What the operations and the sessions of a transport must do."""

ALL_CHANNEL_CHECKS: tuple[Check, ...] = (
    *CHANNEL_CHECKS,
    *CHANNEL_FAULT_CHECKS,
    *CLAIM_CHANNEL_CHECKS,
    *LARGE_CHANNEL_CHECKS,
)
"""What a channel over a transport must do, also where the wire misbehaves."""


async def check_remote_memory(make: Maker) -> None:
    """Run every check of operations and sessions, each on a fresh setting."""
    for check in ALL_REMOTE_MEMORY_CHECKS:
        await check(make())


async def check_devices(make: Maker) -> None:
    """Run every check of inboxes in a device's memory, each on a fresh setting that has a device."""
    for check in DEVICE_CHECKS:
        await check(make())


async def check_channel(make: Maker) -> None:
    """Run every check of channels, each on a fresh setting."""
    for check in ALL_CHANNEL_CHECKS:
        await check(make())


__all__ = [
    "ALL_CHANNEL_CHECKS",
    "ALL_REMOTE_MEMORY_CHECKS",
    "DEVICE_CHECKS",
    "Check",
    "FakeDevice",
    "Faults",
    "FaultyTransport",
    "Maker",
    "Setting",
    "check_channel",
    "check_devices",
    "check_remote_memory",
    "until",
]
