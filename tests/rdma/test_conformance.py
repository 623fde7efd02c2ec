"""The public suite over verbs, unchanged; sessions leave by rxe1 and reach memory behind rxe0."""

from collections.abc import Sequence

import pytest

from tests.rdma.devices import verbs
from transports.testing import ALL_CHANNEL_CHECKS, ALL_REMOTE_MEMORY_CHECKS, Check

LONG = {"much_more_than_a_wire_holds", "refusal_reaches_the_producer"}
SHORT = {"any_length_arrives_whole", "full_is_seen_and_nothing_is_overwritten"}


def marked(checks: Sequence[Check], slow: set[str]) -> list[object]:
    """The checks, those of these names as slow."""
    return [
        pytest.param(check, id=name, marks=[pytest.mark.slow] if name in slow else [])
        for check in checks
        for name in [check.__name__]
    ]


@pytest.mark.parametrize("check", marked(ALL_REMOTE_MEMORY_CHECKS, LONG))
async def test_remote_memory(check: Check) -> None:
    """What the check's docstring says holds over verbs."""
    await check(verbs())


@pytest.mark.parametrize(
    "check", marked(ALL_CHANNEL_CHECKS, {check.__name__ for check in ALL_CHANNEL_CHECKS} - SHORT)
)
async def test_channel(check: Check) -> None:
    """What the check's docstring says holds for a channel over verbs."""
    await check(verbs())
