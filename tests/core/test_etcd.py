"""Leadership through a real etcd: who leads, what is stored, and what a deposed leader can do."""

import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from attrs import evolve

from onepiece.coordination import Coordinator
from onepiece.coordination._etcd_client import (
    EtcdClient,
    EtcdRefusedError,
    EtcdUnreachableError,
    Outcome,
    open_client,
    put,
)
from onepiece.coordination._state_records import to_records
from onepiece.coordination.etcd import EtcdOptions, _Etcd, open_etcd
from onepiece.core import ManagerState
from onepiece.errors import ConfigError, LeadershipLost, StoreFull
from onepiece.node.leadership import opening_coordinator
from onepiece.node.options import read_options
from onepiece.node.parts import NodeParts
from simulations.etcd_process import EtcdServer, run_etcd
from tests.core.cluster import make_need, make_workflow
from tests.etcd_server import needs_etcd

pytestmark = needs_etcd
_CERTIFICATES = Path(__file__).parents[1] / "transports" / "certificates"
OWN = "tcp://a:1/control"
_LEASE_SECONDS = 10
"""A call may take a quarter of it: on a busy machine an etcd can need a second to write."""
VIDEO = make_workflow("video", make_need("denoise"))


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One server for all tests of this file; each uses a prefix of its own."""
    with run_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def options(etcd: EtcdServer) -> EtcdOptions:
    """Of the first candidate."""
    return EtcdOptions((etcd.member,), f"/onepiece/{os.urandom(6).hex()}/", OWN, _LEASE_SECONDS)


@pytest.fixture
async def client(etcd: EtcdServer) -> AsyncIterator[EtcdClient]:
    """To look at, and change, what candidates do not expect to change."""
    async with open_client((etcd.member,), 5.0) as client:
        yield client


def rival(options: EtcdOptions) -> EtcdOptions:
    """Another candidate of the same set."""
    return evolve(options, address="tcp://b:1/control")


def led_by(coordinator: Coordinator) -> _Etcd:
    """Its inside."""
    assert isinstance(coordinator, _Etcd)
    return coordinator


async def until_seen(candidate: Coordinator, leader: str) -> None:
    """Wait until a candidate knows who leads."""
    with anyio.fail_after(20):
        while candidate.leader != leader:  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.01)


async def test_the_next_leader_begins_with_what_was_stored(options: EtcdOptions) -> None:
    """One candidate leads, another waits and knows who does; then that has its state (fault 35)."""
    led = anyio.Event()
    async with open_etcd(rival(options)) as second, anyio.create_task_group() as tasks:

        async def wait() -> None:
            assert await second.lead() == ManagerState(2, 65, (VIDEO,))
            led.set()

        async with open_etcd(options) as first:
            state = await first.lead()
            assert state == ManagerState(epoch=1)
            tasks.start_soon(wait)
            await until_seen(second, options.address)
            await first.store(evolve(state, next_actor_id=65, workflows=(VIDEO,)))
            assert not led.is_set()
        with anyio.fail_after(20):
            await led.wait()
    assert second.leader is None


async def test_a_replaced_state_leaves_nothing(options: EtcdOptions) -> None:
    """A withdrawn workflow is gone for the next leader."""
    async with open_etcd(options) as first:
        state = await first.lead()
        await first.store(evolve(state, workflows=(VIDEO,)))
        await first.store(evolve(state, next_actor_id=9))
    async with open_etcd(options) as second:
        assert await second.lead() == ManagerState(2, 9, ())


async def test_a_deposed_leader_stores_nothing(options: EtcdOptions, client: EtcdClient) -> None:
    """Its key has another create revision, so its write does not hold; it is told, and can lead later."""
    async with open_etcd(options) as first:
        state = await first.lead()
        lease = led_by(first)._term
        assert lease is not None
        await client.revoke(lease.lease)
        async with open_etcd(rival(options)) as second:
            newer = await second.lead()
            with pytest.raises(LeadershipLost, match=r"another manager leads \(tcp://b:1/control\)"):
                await first.store(evolve(state, next_actor_id=99))
            with anyio.fail_after(5):
                await first.wait_lost()
            with pytest.raises(LeadershipLost):
                await first.store(evolve(state, next_actor_id=99))
            await second.store(evolve(newer, next_actor_id=7))
        assert await first.lead() == ManagerState(3, 7)


async def test_a_lost_lease_is_noticed_without_a_write(options: EtcdOptions, client: EtcdClient) -> None:
    """The renewal says that the lease is over; the same candidate leads again by itself (fault 25)."""
    async with open_etcd(options) as first:
        await first.lead()
        term = led_by(first)._term
        assert term is not None
        await client.revoke(term.lease)
        with anyio.fail_after(20):
            await first.wait_lost()
            assert (await first.lead()).epoch == 2


async def test_an_etcd_that_stands_still_ends_the_leadership(options: EtcdOptions, etcd: EtcdServer) -> None:
    """The leader steps down by its own clock, no write is acknowledged, and then all goes on."""
    async with open_etcd(evolve(options, lease_seconds=4)) as first:
        state = await first.lead()
        with etcd.paused(), anyio.fail_after(30):
            with pytest.raises(LeadershipLost, match="no member of etcd answered within"):
                await first.store(evolve(state, next_actor_id=5))
            await first.wait_lost()
        with anyio.fail_after(30):
            assert (await first.lead()).epoch > state.epoch


async def test_a_write_whose_answer_was_lost_is_found(
    options: EtcdOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was carried out: the second try finds that, and does not take it for another's."""
    transact = EtcdClient.transact
    calls: list[Outcome] = []

    async def lossy(self: EtcdClient, *args: Any) -> Outcome:
        calls.append(await transact(self, *args))
        if len(calls) == 1:
            raise EtcdUnreachableError("the answer was lost")
        return calls[-1]

    async with open_etcd(options) as first:
        state = evolve(await first.lead(), next_actor_id=5)
        monkeypatch.setattr(EtcdClient, "transact", lossy)
        await first.store(state)
        assert [call.held for call in calls] == [True, False]
        await first.store(evolve(state, next_actor_id=6))
    async with open_etcd(options) as second:
        assert (await second.lead()).next_actor_id == 6


async def test_a_write_that_arrives_late_changes_nothing(
    options: EtcdOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was given up, repeated and overtaken by a later state does not hold any more."""
    sent: list[tuple[Any, ...]] = []
    transact = EtcdClient.transact

    async def recorded(self: EtcdClient, *args: Any) -> Outcome:
        sent.append(args)
        return await transact(self, *args)

    async with open_etcd(options) as first:
        state = await first.lead()
        monkeypatch.setattr(EtcdClient, "transact", recorded)
        await first.store(evolve(state, next_actor_id=5))
        await first.store(evolve(state, next_actor_id=6))
        late = await transact(led_by(first)._client, *sent[0])
        assert not late.held
    async with open_etcd(options) as second:
        assert (await second.lead()).next_actor_id == 6


async def test_two_candidates_at_once(options: EtcdOptions) -> None:
    """Of many that try at the same moment one leads, and each leadership has an epoch of its own."""
    epochs: list[int] = []

    async def lead_once(number: int) -> None:
        async with open_etcd(evolve(options, address=f"tcp://c{number}:1/control")) as candidate:
            epochs.append((await candidate.lead()).epoch)

    with anyio.fail_after(40):
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(lead_once, number)
    assert epochs == [1, 2, 3]


async def test_a_state_of_another_version_is_named(options: EtcdOptions, client: EtcdClient) -> None:
    """It is an error with its place and a way out, and the leadership is given up."""
    await client.transact([], [put(f"{options.prefix}state/counters".encode(), b"what")], [])
    with pytest.raises(ExceptionGroup) as caught:
        async with open_etcd(options) as first:
            await first.lead()
    assert caught.group_contains(ConfigError, match="of another version of OnePiece")
    assert await client.read(f"{options.prefix}leader".encode()) == {}


async def test_what_etcd_refuses_is_not_stored(options: EtcdOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full etcd is a full store: the manager waits and tries again."""

    async def full(*_: object) -> Outcome:
        raise EtcdRefusedError("etcdserver: mvcc: database space exceeded")

    async with open_etcd(options) as first:
        state = await first.lead()
        with monkeypatch.context() as patched:
            patched.setattr(EtcdClient, "transact", full)
            with pytest.raises(StoreFull, match="space exceeded"):
                await first.store(state)
        await first.store(state)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"status": "ok"},
        {"header": "none", "ID": "x", "kvs": {}, "result": []},
        {"header": {"revision": "x"}, "ID": [], "result": None, "kvs": [{}]},
    ],
)
async def test_json_that_is_no_etcd_s_is_no_answer(answer: dict[str, Any]) -> None:
    """What serves HTTP at the address need not be an etcd, and may answer all with JSON."""
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, json=answer))
    async with httpx.AsyncClient(transport=transport) as http:
        client = EtcdClient(("http://not.an.etcd:1",), 1.0, http)
        for call in (
            lambda: client.read(b"k"),
            lambda: client.grant(5),
            lambda: client.keep_alive(1),
            lambda: client.revoke(1),
            lambda: client.transact([], [], [b"k"]),
        ):
            with pytest.raises(EtcdUnreachableError, match="not that of an etcd"):
                await call()


async def test_members_that_do_not_answer_are_named() -> None:
    """Without etcd a manager does not start; the error says what was tried."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        members = ("http://127.0.0.1:1", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError) as caught:
            async with open_etcd(EtcdOptions(members, "/x/", "a", 2, start_seconds=1.0)):
                raise AssertionError("there is no etcd")
    assert all(member in caught.value.message for member in members)
    assert "start etcd" in caught.value.message


async def test_an_etcd_behind_tls(tmp_path: Path) -> None:
    """It is spoken to with the node's certificate, which it asks for; without one nobody leads."""
    certificate, key, authority = (
        f"{_CERTIFICATES}/{name}" for name in ("node.pem", "node.key", "authority.pem")
    )
    wanted = (
        "--cert-file",
        certificate,
        "--key-file",
        key,
        "--client-cert-auth",
        "--trusted-ca-file",
        authority,
    )
    with run_etcd(tmp_path, *wanted, scheme="https") as server:
        flags = ["--coordination", server.coordination, "--tls-authority", authority]
        with pytest.raises(ConfigError, match="no member of etcd answered"):
            async with opening_coordinator(read_options(flags, {}), NodeParts(), tmp_path, "a"):
                raise AssertionError("it asks for a certificate")
        flags += ["--tls-certificate", certificate, "--tls-key", key]
        async with opening_coordinator(read_options(flags, {}), NodeParts(), tmp_path, "a") as first:
            assert (await first.lead()).epoch == 1


async def test_a_member_that_is_gone_is_passed_over(options: EtcdOptions) -> None:
    """As long as one member answers, the others' absence costs time alone."""
    members = ("http://127.0.0.1:1", *options.members)
    async with open_etcd(evolve(options, members=members)) as first:
        assert to_records(await first.lead())
