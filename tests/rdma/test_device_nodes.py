"""Node processes with inboxes in a pretended GPU's memory, which adapters write to; one of them is killed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.node_set import NodeSet, eventually, open_set
from tests.node import gpu_stages
from tests.rdma.devices import OWNERS, PRODUCERS
from tests.rdma.gpu_stages import FIRST_RUN
from transports.verbs_devices import SETTINGS_VARIABLE

PATIENT: Final = ("--heartbeat-seconds", "2", "--lease-seconds", "60")
SMALL: Final = ("--inbox-bytes", "8388608")
"""Registered memory is pinned, and the machine has little."""
LISTEN: Final = ("--listen", "verbs://127.0.0.1:0", "--log-level", "debug")
LENGTH: Final = 3_000_000
WORKFLOW: Final = "tests.rdma.gpu_stages:shown"


@pytest.fixture
def over_verbs(tmp_path: Path) -> Iterator[NodeSet]:
    """A seed, and three workers with a GPU each, behind two adapters."""
    first = {FIRST_RUN: str(tmp_path / "first")}
    with open_set(tmp_path / "set") as a_set:
        seed = ("--roles", "proxy,manager,store", "--workers", "3", "--workflow", WORKFLOW)
        a_set.start(*seed, *LISTEN, *PATIENT, *SMALL, environment={SETTINGS_VARIABLE: OWNERS, **first})
        worker = ("--roles", "worker", "--join", a_set.seed.address, "--devices", "cuda:0=4GiB")
        for adapter in (OWNERS, PRODUCERS, PRODUCERS):
            a_set.start(*worker, *LISTEN, *PATIENT, *SMALL, environment={SETTINGS_VARIABLE: adapter, **first})
        a_set.wait_ready()
        yield a_set


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_process_with_an_inbox_on_its_device_is_killed(over_verbs: NodeSet, tmp_path: Path) -> None:
    """What adapters wrote into its device's memory they write into another one's again, bit for bit.

    An instance whose inbox is anywhere else would not have been ready, and each sender reached the device.
    """
    api, first = over_verbs.api(), tmp_path / "first"
    uid = api.submit("shown", {"seed": 5, "length": LENGTH}, timeout_seconds=900.0)
    eventually(lambda: first.exists() and first.read_text(), "look runs")
    [victim] = [node for node in over_verbs.workers if node.pid == int(first.read_text())]
    victim.kill()
    api.ended(uid, 900.0)
    assert api.result(uid) == gpu_stages.seen(gpu_stages.pixels(5, LENGTH))
    assert not any("device_bytes_through_host" in node.log() for node in over_verbs.nodes)
