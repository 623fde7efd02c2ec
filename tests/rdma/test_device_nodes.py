"""Node processes with inboxes in a pretended GPU's memory, which adapters write to; one of them is killed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest

from tests.acceptance.node_set import NodeSet, eventually, open_set
from tests.node import gpu_stages
from tests.node.gpu_set import gpu_set
from tests.node.in_process import proxy_of, run
from tests.rdma.devices import OWNERS, PRODUCERS
from tests.rdma.gpu_stages import FIRST_RUN, ReachableDriver
from tests.runtime.pretended_gpu import pretended_gpu
from transports import Address
from transports.cuda import CudaDevice
from transports.verbs_devices import SETTINGS_VARIABLE

PATIENT: Final = ("--heartbeat-seconds", "2", "--lease-seconds", "60")
SMALL: Final = ("--inbox-bytes", "8388608")
"""Registered memory is pinned, and the machine has little."""
LISTEN: Final = ("--listen", "verbs://127.0.0.1:0", "--log-level", "debug")
LENGTH: Final = 500_000
SECONDS: Final = 300.0
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
@pytest.mark.timeout(600)
async def test_adapters_write_into_the_inboxes_of_nodes(tmp_path: Path) -> None:
    """Tensors come from stage to stage bit for bit; nothing passes through the host that is not retained."""
    gpu_stages.reset()
    driver = ReachableDriver()
    listen = Address.parse(f"verbs://127.0.0.1:0?{OWNERS}")
    times: dict[str, Any] = {"lease_seconds": 60.0, "heartbeat_seconds": 2.0}
    with pretended_gpu(driver), mock.patch.object(CudaDevice, "check_peer_access"):
        async with gpu_set("shown_once", directory=tmp_path, workers=3, listen=listen, **times) as a_set:
            proxy = proxy_of(a_set.seed)
            async with asyncio.timeout(SECONDS):
                while not proxy.readiness().ready:  # noqa: ASYNC110 - a view, nobody is told of its change
                    await asyncio.sleep(0.1)
            told = await run(proxy, "shown_once", {"seed": 7, "length": LENGTH}, SECONDS)
            assert told == gpu_stages.seen(gpu_stages.pixels(7, LENGTH))
            (address,) = gpu_stages.arrived
            assert any(address in each for each in a_set.spans_of_inboxes())
            assert driver.copied_to_host == []


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
