"""How requests end: cancelled at each moment, told by any proxy, poisoned, submitted twice."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from attrs import evolve

import onepiece
from onepiece.client import Client
from onepiece.errors import RequestCancelled, UnknownRequest
from onepiece.messages import CONTROL_REGION, ReleaseRequests
from onepiece.node.result_reader import ResultReader
from onepiece.requests import EventKind, RequestState, RequestStatus
from tests.node import hop_stages
from tests.node.hop_crashes import LEASE_SECONDS, NEVER, HopSet, Trap, open_hop_set, set_trap
from tests.node.in_process import patiently
from tests.node.proxy_set import until

TRIES = 40
TRIES_MAX = 10_000
NOBODY_DIES = 60.0
"""A lease that a loop which is busy without a pause does not let end."""


@asynccontextmanager
async def ready_set(
    directory: Path, trap: Trap, patch: pytest.MonkeyPatch, *, lease_seconds: float = LEASE_SECONDS
) -> AsyncIterator[tuple[HopSet, Client, Client]]:
    """The set, and a client of each proxy."""
    set_trap(trap, patch)
    opening = open_hop_set(directory, trap, lease_seconds=lease_seconds)
    async with opening as a_set, AsyncExitStack() as stack:
        urls = [str(a_set.living[name].node.http) for name in ("proxy-1", "proxy-2")]
        one, other = [await stack.enter_async_context(onepiece.connect(url)) for url in urls]
        yield a_set, one, other


@pytest.mark.timeout(90)
@pytest.mark.parametrize("moment", ["taken", "running", "computed", "retained", "finished"])
async def test_cancel(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued, running, between stages, in flight: cancelled, and nothing stays (faults 66, 105).

    A result that is stored stands, though its owner has not heard of it: for every client.
    """
    ends_in = RequestState.FINISHED if moment == "finished" else RequestState.CANCELLED
    trap = Trap(moment)
    async with ready_set(tmp_path, trap, monkeypatch, lease_seconds=NOBODY_DIES) as (a_set, one, other):
        handle = await one.submit("film", {"text": "ahoy"}, timeout=40)
        await trap.caught.wait()
        status = await handle.cancel()
        trap.let_go.set()
        other_handle = other.attach(handle.uid)
        assert status.state is ends_in
        assert (await other_handle.status()).state is ends_in, "it was told before every proxy could tell it"
        if ends_in is RequestState.CANCELLED:
            with pytest.raises(RequestCancelled):
                await handle.result()
        else:
            assert await other_handle.result() == "ahoy, drawn, refined, rendered"
        await until(lambda: not a_set.retained_sources())
        assert (await one.submit("film", {"text": "next"}, timeout=40)) is not None


@pytest.mark.parametrize(
    ("tries", "at_once"),
    [
        pytest.param(TRIES, 1, marks=pytest.mark.timeout(90)),
        pytest.param(TRIES_MAX, 8, marks=[pytest.mark.full, pytest.mark.timeout(90 + 0.5 * TRIES_MAX)]),
    ],
)
async def test_cancel_races_completion(
    tries: int, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever comes first wins, and what the owner said once it says always (fault 107)."""
    turns = iter(range(tries))
    ends: Counter[RequestState] = Counter()
    async with ready_set(tmp_path, Trap(NEVER), monkeypatch, lease_seconds=NOBODY_DIES) as (a_set, one, _):

        async def race() -> None:
            for turn in turns:
                submit = partial(one.submit, "film", {"text": "ahoy"}, timeout=40, key=f"turn {turn}")
                handle = await patiently(submit)
                await asyncio.sleep(0.002 * (turn % TRIES))
                told = await patiently(handle.cancel)
                end = (await patiently(handle.wait)).state
                # What is not final is what a loaded machine had no time to store.
                assert told.state is end if told.state.is_final else at_once > 1
                ends[end] += 1

        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(race())
        assert ends.total() == tries
        await until(lambda: not a_set.retained_sources())


@pytest.mark.timeout(90)
async def test_any_proxy_tells_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another proxy knows result and error at once, and still when the owner is dead (fault 115)."""
    async with ready_set(tmp_path, Trap(NEVER), monkeypatch) as (a_set, one, other):
        finished = await one.submit("film", {"text": "ahoy"}, timeout=40)
        assert await finished.result(keep=True) == "ahoy, drawn, refined, rendered"
        assert await other.attach(finished.uid).result(keep=True) == "ahoy, drawn, refined, rendered"

        async def stay(_: str) -> None:
            await asyncio.Event().wait()

        hop_stages.hooks["refine"] = stay
        cancelled = await one.submit("film", {"text": "ahoy"}, timeout=40)
        await until(lambda: hop_stages.runs["refine"] == 2)
        await cancelled.cancel()
        await a_set.die("proxy-1")
        assert (await other.attach(cancelled.uid).wait()).state is RequestState.CANCELLED
        assert (await other.attach(finished.uid).wait()).state is RequestState.FINISHED
        [end] = [event async for event in other.attach(finished.uid).events(after=7)]
        assert end.kind is EventKind.FINISHED
        assert [event async for event in other.attach(finished.uid).events(after=end.sequence)] == []


@pytest.mark.timeout(90)
async def test_an_adopted_request_has_ended_as_the_stores_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first owner, cut off and not dead, may have ended it otherwise, and that may be what stands."""
    async with ready_set(tmp_path, Trap(NEVER), monkeypatch) as (a_set, one, other):
        go_on = asyncio.Event()

        async def wait(_: str) -> None:
            await go_on.wait()

        hop_stages.hooks["refine"] = wait
        uid = (await one.submit("film", {"text": "ahoy"}, timeout=40)).uid
        await until(lambda: hop_stages.runs["refine"] == 1)
        await a_set.die("proxy-1")
        go_on.set()
        assert (await patiently(other.attach(uid).wait)).state is RequestState.FINISHED
        describe = ResultReader.describe

        async def cancelled(self: ResultReader, uid: str) -> RequestStatus:
            found = await describe(self, uid)
            error = RequestCancelled(f"request {uid} was cancelled", uid=uid)
            return evolve(found, state=RequestState.CANCELLED, error=error.to_wire())

        monkeypatch.setattr(ResultReader, "describe", cancelled)
        assert (await other.attach(uid).status()).state is RequestState.CANCELLED
        assert [event.kind async for event in other.attach(uid).events()] == [EventKind.CANCELLED]
        own = await other.submit("film", {"text": "ahoy"}, timeout=40)
        assert (await own.wait()).state is RequestState.FINISHED, "nobody else can have driven this one"


@pytest.mark.timeout(90)
async def test_word_that_a_request_has_ended_is_not_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner whose stages were let go of by another one asks the stores how it has ended."""
    async with ready_set(tmp_path, Trap(NEVER), monkeypatch, lease_seconds=NOBODY_DIES) as (a_set, one, _):

        async def stay(_: str) -> None:
            await asyncio.Event().wait()

        hop_stages.hooks["refine"] = stay
        uid = (await one.submit("film", {"text": "ahoy"}, timeout=40)).uid
        await until(lambda: hop_stages.runs["refine"] == 1)

        async def cancelled(_: ResultReader, uid: str) -> RequestStatus:
            error = RequestCancelled(f"request {uid} was cancelled", uid=uid).to_wire()
            return RequestStatus(uid, "film", RequestState.CANCELLED, 0.0, None, None, {}, error=error)

        monkeypatch.setattr(ResultReader, "describe", cancelled)
        env = a_set.living["proxy-2"].node.env
        for node in env.routes.table.nodes:
            env.outbox.post(f"{node.address}/{CONTROL_REGION}", ReleaseRequests((uid,)))
        end = await one.attach(uid).wait()
        assert end.state is RequestState.CANCELLED
        assert end.error is not None
        assert end.error["error"] == "RequestCancelled"


@pytest.mark.timeout(90)
async def test_one_key_at_two_proxies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose submission was answered by nobody submits at another proxy: one request (fault 131)."""
    async with ready_set(tmp_path, Trap(NEVER), monkeypatch, lease_seconds=NOBODY_DIES) as (_, one, other):
        async with asyncio.TaskGroup() as tasks:
            both = [
                tasks.create_task(client.submit("film", {"text": "ahoy"}, timeout=40, key="order-17"))
                for client in (one, other)
            ]
        uids = {task.result().uid for task in both}
        assert len(uids) == 1
        assert await other.attach(uids.pop()).result() == "ahoy, drawn, refined, rendered"
        assert hop_stages.runs["render"] == 1


@pytest.mark.timeout(90)
async def test_a_request_nobody_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unknown, once the set has been up for long enough to be sure of that."""
    monkeypatch.setattr("onepiece.runtime.environment.STORES_RETURN_SECONDS", 0.0)
    async with ready_set(tmp_path, Trap(NEVER), monkeypatch, lease_seconds=NOBODY_DIES) as (_, one, _):
        with pytest.raises(UnknownRequest):
            await one.attach("01JDWX4T9Z7Q2M3K8V5N6P0R1S").status()
