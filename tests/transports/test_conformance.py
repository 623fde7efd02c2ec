"""Every transport passes the public suite unchanged."""

from itertools import count

import pytest
from attrs import evolve

from transports.address import Address
from transports.errors import UnknownScheme
from transports.local import LocalTransport
from transports.memory import Capabilities, Options, RemoteMemory
from transports.registry import transport_for
from transports.tcp import TcpTransport
from transports.testing import (
    ALL_CHANNEL_CHECKS,
    ALL_REMOTE_MEMORY_CHECKS,
    Check,
    Maker,
    Setting,
)
from transports.testing.forwarding import ForwardingMemory
from transports.testing.large_checks import LARGE_CHANNEL_CHECKS, LARGE_MEMORY_CHECKS

_NAMES = count()


def local() -> Setting:
    """A name of its own within this process."""
    return Setting(LocalTransport(), Address.parse(f"local://conformance-{next(_NAMES)}"))


def tcp() -> Setting:
    """A free port of the loopback interface."""
    return Setting(TcpTransport(), Address.parse("tcp://127.0.0.1:0"))


def tcp_with_secret() -> Setting:
    """The same, among members of a cluster."""
    return Setting(TcpTransport(), Address.parse("tcp://127.0.0.1:0"), Options(secret=b"of this cluster"))


def ucx() -> Setting:
    """Shared memory between two workers of this process: nothing less will do."""
    try:
        transport = transport_for("ucx")
    except UnknownScheme as missing:
        pytest.skip(f"no libucp: {missing}")
    address = Address.parse("ucx://127.0.0.1:0?require=shm")
    return Setting(transport, address, Options(secret=b"of this cluster"))


MAKERS = [local, tcp, tcp_with_secret, ucx]


class _WithoutExports(ForwardingMemory):
    """A session of a transport that exports nothing."""

    @property
    def capabilities(self) -> Capabilities:
        """As inside, but for that."""
        return evolve(super().capabilities, pull_share=0.0)


class _WithoutExportsTransport(LocalTransport):
    """Opens such sessions."""

    async def connect(self, address: Address, hello: bytes, options: Options) -> RemoteMemory:
        """Open one."""
        return _WithoutExports(await super().connect(address, hello, options))


@pytest.mark.parametrize(
    "check", [*LARGE_MEMORY_CHECKS, *LARGE_CHANNEL_CHECKS], ids=lambda check: check.__name__
)
async def test_without_exports(check: Check) -> None:
    """A transport that exports nothing refuses what its ring cannot hold, and passes."""
    address = Address.parse(f"local://conformance-{next(_NAMES)}")
    await check(Setting(_WithoutExportsTransport(), address))


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("check", ALL_REMOTE_MEMORY_CHECKS, ids=lambda check: check.__name__)
async def test_remote_memory(check: Check, make: Maker) -> None:
    """What the check's docstring says holds over this transport."""
    await check(make())


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("check", ALL_CHANNEL_CHECKS, ids=lambda check: check.__name__)
async def test_channel(check: Check, make: Maker) -> None:
    """What the check's docstring says holds for a channel over this transport."""
    await check(make())
