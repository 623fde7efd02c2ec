"""Node processes that reach each other over verbs, by two devices."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from stages.synthetic import expected_digest
from tests.acceptance.node_set import NodeSet, open_set
from tests.rdma.devices import OWNERS, PRODUCERS
from transports.verbs_devices import SETTINGS_VARIABLE

PATIENT: Final = ("--heartbeat-seconds", "5", "--lease-seconds", "300")
"""Emulated processors need their time; nobody is declared dead for it."""
SMALL: Final = ("--inbox-bytes", "8388608")
"""Registered memory is pinned, and the machine has little."""
LISTEN: Final = ("--listen", "verbs://127.0.0.1:0", "--log-level", "debug")
"""What transports tell of their sessions is not written otherwise."""


@pytest.fixture
def over_verbs(tmp_path: Path) -> Iterator[NodeSet]:
    """A seed and a worker on rxe0, another worker on rxe1."""
    on_first, on_second = {SETTINGS_VARIABLE: OWNERS}, {SETTINGS_VARIABLE: PRODUCERS}
    with open_set(tmp_path / "set") as a_set:
        seed = ("--roles", "proxy,manager,store", "--workers", "2", "--workflow", "stages.synthetic:diamond")
        a_set.start(*seed, *LISTEN, *PATIENT, *SMALL, environment=on_first)
        a_set.start_worker(*LISTEN, *PATIENT, *SMALL, environment=on_first)
        a_set.start_worker(*LISTEN, *PATIENT, *SMALL, environment=on_second)
        a_set.wait_ready()
        yield a_set


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_workflow_runs_over_verbs(over_verbs: NodeSet) -> None:
    """A fork and a join across three processes and two devices, payloads small and large, byte for byte.

    Each node says of every session by which device its memory is written to.
    """
    api = over_verbs.api()
    assert over_verbs.seed.address.startswith("verbs://")
    for size in (1, 1_500_000):
        outcome = api.run("diamond", {"payload_bytes": size, "seed": size})
        assert outcome.digest == expected_digest("diamond", size, seed=size)
    for node, device in zip(over_verbs.nodes, ("rxe0", "rxe0", "rxe1"), strict=True):
        over = set(re.findall(r"writes over (\w+) port 1, gid", node.log_path.read_text()))
        assert over == {device}, f"{node.name} serves memory behind {device}:\n{node.log()}"
