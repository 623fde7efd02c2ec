"""Several managers that agree through etcd: the leader is killed under load, and no request notices."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from attrs import define

import onepiece
from onepiece.client import Client
from onepiece.coordination import parse_coordination
from onepiece.coordination._etcd_client import EtcdClient, open_client
from simulations.chaos.ledger import judge
from simulations.chaos.requests import Load, Stream
from simulations.etcd_process import EtcdServer, run_etcd
from stages.synthetic import expected_digest
from tests.acceptance.node_set import (
    DEVICE,
    READY_SECONDS,
    NodeProcess,
    NodeSet,
    eventually,
    open_set,
    run_node,
)
from tests.etcd_server import needs_etcd

LOAD = Load(
    rate=4.0,
    in_flight_max=8,
    stage_seconds=0.05,
    payload_bytes=100_000,
    timeout_seconds=60.0,
    patience_seconds=10.0,
)
MANAGERS = ("manager-1", "manager-2", "manager-3")
PROXIES = ("proxy-1", "proxy-2")
WORKERS = ("worker-1", "worker-2")


@define(eq=False)
class Managed:
    """A set with three candidates."""

    nodes: NodeSet
    managers: dict[str, NodeProcess]
    proxies: dict[str, NodeProcess]
    etcd: EtcdClient
    leader_key: bytes

    async def leader(self) -> NodeProcess | None:
        """The candidate whose key it is."""
        held = (await self.etcd.read(self.leader_key)).get(self.leader_key)
        address = "" if held is None else held.value.decode().removesuffix("/control")
        return next((each for each in self.managers.values() if each.address == address), None)

    async def led_by(self, is_wanted: Callable[[NodeProcess], bool]) -> NodeProcess:
        """Wait for a leader of this kind."""
        async with asyncio.timeout(READY_SECONDS):
            while True:
                leader = await self.leader()
                if leader is not None and is_wanted(leader):
                    return leader
                await asyncio.sleep(0.05)

    async def kill_leader(self) -> NodeProcess:
        """Kill it, and wait until another leads; the one that was killed."""
        killed = await self.led_by(lambda _: True)
        killed.kill()
        await self.led_by(lambda node: node is not killed)
        return killed

    def start_again(self, killed: NodeProcess) -> None:
        """Start it as a candidate, in the place where it was."""
        name = next(name for name, node in self.managers.items() if node is killed)
        self.managers[name] = self.nodes.start_again(killed)


@contextlib.asynccontextmanager
async def managed(directory: Path, server: EtcdServer) -> AsyncIterator[Managed]:
    """Three managers, two proxies that keep requests and results, and two workers."""
    chosen = parse_coordination(server.coordination)
    leading = ("--coordination", server.coordination, "--leader-seconds", "4", "--workers", f"{len(WORKERS)}")
    workflow = ("--workflow", "simulations.chaos.workflow:diamond")
    with open_set(directory) as a_set:
        managers = {
            name: a_set.start("--name", name, "--roles", "manager", *leading, *workflow) for name in MANAGERS
        }
        joining = ("--join", ",".join(node.address for node in managers.values()))
        proxies = {name: a_set.start("--name", name, "--roles", "proxy,store", *joining) for name in PROXIES}
        for name in WORKERS:
            a_set.start("--name", name, "--roles", "worker", *joining, "--devices", DEVICE)
        async with open_client(chosen.members, 5.0) as etcd:
            yield Managed(a_set, managers, proxies, etcd, f"{chosen.prefix}leader".encode())


async def seen(client: Client, names: set[str]) -> None:
    """Wait until the set is seen to consist of these nodes."""
    async with asyncio.timeout(READY_SECONDS):
        while {node.node for node in await client.nodes()} != names:  # noqa: ASYNC110 - another process's
            await asyncio.sleep(0.05)


@needs_etcd
@pytest.mark.timeout(240)
async def test_the_leader_is_killed_twice_under_load(tmp_path: Path) -> None:
    """Another candidate leads, the nodes find it and keep what they run, and no request fails (fault 35)."""
    with run_etcd(tmp_path) as server:
        async with managed(tmp_path / "set", server) as a_set, AsyncExitStack() as stack:
            proxies = {
                name: await stack.enter_async_context(onepiece.connect(node.http))
                for name, node in a_set.proxies.items()
            }
            for each in proxies.values():
                await each.wait_ready(READY_SECONDS)
            urls = ",".join(each.url for each in proxies.values())
            client = await stack.enter_async_context(onepiece.connect(urls))
            incarnations = {node.node: node.incarnation for node in await client.nodes()}
            stream = Stream(client, proxies, LOAD, random.Random(7))
            stop = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(stream.run(stop))
                a_set.start_again(await a_set.kill_leader())
                last = await a_set.kill_leader()
                others = {node.node_id for node in a_set.nodes.nodes if node.is_running} - {last.node_id}
                await seen(client, others)
                stop.set()
            await stream.confirm(READY_SECONDS)
            still = {node.node: node.incarnation for node in await client.nodes()}
    for name in (*PROXIES, *WORKERS):
        assert still[name] == incarnations[name], f"{name} had to join anew"
    verdict = judge(stream.submissions, [])
    assert verdict.holds, [each.trouble for each in stream.submissions if each.trouble]
    assert verdict.finished == verdict.submitted > 0
    assert not verdict.failed


@pytest.mark.timeout(240)
def test_work_goes_on_while_nobody_leads(tmp_path: Path) -> None:
    """The only manager is killed: what runs ends, and what comes afterwards is accepted and runs, too."""
    with open_set(tmp_path) as a_set:
        manager = a_set.start("--roles", "manager", "--workflow", "stages.synthetic:chain", "--workers", "1")
        joining = ("--join", manager.address)
        proxy = a_set.start("--roles", "proxy,store", *joining)
        a_set.start("--roles", "worker", *joining, "--devices", DEVICE)
        api = a_set.api(proxy)
        eventually(lambda: api.readiness()["ready"], "every stage is loaded")
        running = api.submit("chain", {"seconds": [0.0, 1.0, 0.0]})
        eventually(lambda: api.status(running)["stages"].get("second") == "running", "it is amid a stage")
        manager.kill()
        assert api.status(running)["state"] == "running"
        assert api.result(running).digest == expected_digest("chain")
        for _ in range(3):
            assert api.run("chain").digest == expected_digest("chain")
        assert not manager.is_running


def test_without_etcd_a_manager_does_not_start() -> None:
    """It ends as one with unusable options does, and says at which address nobody answered."""
    ended = run_node("--roles", "manager", "--coordination", "etcd://127.0.0.1:1")
    assert ended.returncode == 2, ended.stderr
    assert "no member of etcd answered" in ended.stderr
    assert "http://127.0.0.1:1" in ended.stderr
