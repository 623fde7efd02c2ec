"""Transports for as long, or as often, as it took elsewhere for a fault to show."""

import os
from random import Random
from typing import Final

import pytest

from tests.transports.test_conformance import MAKERS
from transports.testing import ALL_CHANNEL_CHECKS, ALL_REMOTE_MEMORY_CHECKS, Maker
from transports.testing.channel_checks import (
    cancelled_receive_loses_nothing,
    many_tasks_share_a_sender,
    small_messages_all_arrive,
)

ROUNDS: Final = int(os.environ.get("ROUNDS", "3"))
"""Of all checks; the thousand of the report take hours."""
SMALL: Final = (small_messages_all_arrive, many_tasks_share_a_sender, cancelled_receive_loses_nothing)
both = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


@both
@pytest.mark.parametrize("rounds", [2, pytest.param(1000, marks=pytest.mark.full)])
@pytest.mark.timeout(900)
async def test_small_checks_again_and_again(rounds: int, make: Maker) -> None:
    """What hung once in a hundred runs elsewhere: small messages, sent and received (fault 137)."""
    rng = Random(rounds)
    for _ in range(rounds):
        check = rng.choice(SMALL)
        await check(make())


@pytest.mark.full
@both
@pytest.mark.timeout(100 + 60 * ROUNDS)
async def test_all_checks_again_and_again(make: Maker) -> None:
    """All of the suite, each round in another order (fault 137)."""
    rng = Random(ROUNDS)
    checks = [*ALL_CHANNEL_CHECKS, *ALL_REMOTE_MEMORY_CHECKS]
    for _ in range(ROUNDS):
        rng.shuffle(checks)
        for check in checks:
            await check(make())


@pytest.mark.full
@both
@pytest.mark.timeout(900)
async def test_a_million_small_messages(make: Maker) -> None:
    """None is lost, none comes twice or out of order (fault 63)."""
    await small_messages_all_arrive(make(), 1_000_000)
