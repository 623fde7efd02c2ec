"""The public suite over verbs, unchanged; sessions leave by rxe1 and reach memory behind rxe0."""

import pytest

from tests.rdma.devices import verbs
from transports.testing import ALL_CHANNEL_CHECKS, ALL_REMOTE_MEMORY_CHECKS, Check


@pytest.mark.parametrize("check", ALL_REMOTE_MEMORY_CHECKS, ids=lambda check: check.__name__)
async def test_remote_memory(check: Check) -> None:
    """What the check's docstring says holds over verbs."""
    await check(verbs())


@pytest.mark.parametrize("check", ALL_CHANNEL_CHECKS, ids=lambda check: check.__name__)
async def test_channel(check: Check) -> None:
    """What the check's docstring says holds for a channel over verbs."""
    await check(verbs())
