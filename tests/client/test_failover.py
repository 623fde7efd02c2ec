"""A client that knows several proxies: which it asks, whom it follows, and how long it waits."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from attrs import define

import onepiece
from onepiece.client import Client, ClientOptions
from onepiece.errors import (
    ConfigError,
    NodeUnreachable,
    NotReady,
    OnePieceError,
    UnknownRequest,
    UnknownWorkflow,
)
from onepiece.node.http_testing import FakeFrontend
from onepiece.node.proxy import build_app, serve
from onepiece.requests import EventKind
from stages.echo import echo

QUICK = ClientOptions(attempts=2, patience_seconds=30.0)


@define
class Pair:
    """Two proxies and a client that knows both."""

    frontends: list[FakeFrontend]
    urls: list[str]
    client: Client


@asynccontextmanager
async def pair(options: ClientOptions = QUICK) -> AsyncIterator[Pair]:
    """Two proxies on free ports."""
    async with AsyncExitStack() as stack:
        frontends = [FakeFrontend([echo]), FakeFrontend([echo])]
        ports = [
            await stack.enter_async_context(serve(build_app(each), shutdown_seconds=2)) for each in frontends
        ]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        client = await stack.enter_async_context(onepiece.connect(",".join(urls), options))
        yield Pair(frontends, urls, client)


class DyingOwner(dict[str, str]):
    """Who owns a request, and whether that was asked twice."""

    def __init__(self, owners: dict[str, str]) -> None:
        super().__init__(owners)
        self.asked = 0
        self.was_asked_again = asyncio.Event()

    def __getitem__(self, uid: str) -> str:
        self.asked += 1
        if self.asked == 2:
            self.was_asked_again.set()
        return super().__getitem__(uid)


def nowhere() -> str:
    """The URL of a port where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


async def test_another_proxy_is_asked_where_one_is_gone() -> None:
    """A call goes to the next proxy, and so do those behind it: nobody asks the dead one each time."""
    async with pair() as served:
        dead, living = nowhere(), served.urls[1]
        async with onepiece.connect(f"{dead}, {living}", QUICK) as client:
            assert client.url == dead
            handle = await client.submit(echo(text="x"))
            assert client.url == living
            served.frontends[1].finish(handle.uid, "X!")
            assert await handle.result() == "X!"


@pytest.mark.parametrize("refusal", [NotReady("proxy-1 is draining"), onepiece.Overloaded("too many")])
async def test_another_proxy_takes_what_one_refuses(refusal: onepiece.Rejected) -> None:
    """A proxy that drains, or has no room, sends its clients to the next; the key is the same there."""
    async with pair() as served:
        served.frontends[0].rejection = refusal
        handle = await served.client.submit(echo(text="x"), key="order-17")
        [request] = served.frontends[1].requests_by_uid.values()
        assert (request.status.uid, request.status.key) == (handle.uid, "order-17")
        assert not served.frontends[0].requests_by_uid


async def test_a_refusal_by_all_is_told_at_once() -> None:
    """Each proxy is asked once; then the client is told, and decides when to come again."""
    async with pair() as served:
        for frontend in served.frontends:
            frontend.rejection = NotReady("stages are loading")
        with pytest.raises(NotReady, match="stages are loading"):
            await served.client.submit(echo(text="x"))
        assert [len(frontend.asked_admission) for frontend in served.frontends] == [1, 1]


async def test_what_no_proxy_can_change_is_told_by_the_first() -> None:
    """A workflow that does not exist is not looked for elsewhere."""
    async with pair() as served:
        with pytest.raises(UnknownWorkflow):
            await served.client.submit("no-such", {})
        assert not served.frontends[1].asked_admission


async def test_a_request_is_followed_to_its_owner() -> None:
    """Any proxy is asked; it names the owner, and status, events, cancel and result are the owner's."""
    async with pair() as served:
        one, owner = served.frontends
        status = await owner.submit("echo", {"text": "x"}, timeout_seconds=None, key=None)
        one.owned_elsewhere[status.uid] = served.urls[1]
        handle = served.client.attach(status.uid)
        assert (await handle.status()).uid == status.uid
        owner.report(status.uid, EventKind.PROGRESS, "shout", step=1)
        kinds = []
        async for event in handle.events():
            kinds.append(event.kind)
            if event.kind is EventKind.PROGRESS:
                owner.finish(status.uid, "X!")
        assert kinds == [EventKind.ACCEPTED, EventKind.PROGRESS, EventKind.FINISHED]
        assert (await handle.cancel()).state.value == "finished"
        assert await handle.result() == "X!"
        assert owner.requests_by_uid[status.uid].is_purged
        assert served.client.url == served.urls[0], "only this request is somebody else's"


async def test_the_death_of_an_owner_is_waited_for() -> None:
    """While the owner is gone the client asks on; when another proxy has adopted the request it goes on."""
    async with pair() as served:
        one, adopter = served.frontends
        status = await adopter.submit("echo", {"text": "x"}, timeout_seconds=None, key=None)
        one.owned_elsewhere = owners = DyingOwner({status.uid: nowhere()})
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(served.client.attach(status.uid).wait())
            await owners.was_asked_again.wait()
            owners[status.uid] = served.urls[1]
            adopter.finish(status.uid, "X!")
        assert waiting.result().state.value == "finished"


async def test_patience_ends() -> None:
    """An owner that stays gone is told, with its address."""
    async with pair(ClientOptions(patience_seconds=0.05)) as served:
        dead = nowhere()
        status = await served.frontends[0].submit("echo", {"text": "x"}, timeout_seconds=None, key=None)
        for frontend in served.frontends:
            frontend.owned_elsewhere[status.uid] = dead
        handle = served.client.attach(status.uid)
        for call in (handle.status, handle.cancel, handle.wait):
            with pytest.raises(NodeUnreachable, match=dead):
                await call()


async def test_proxies_that_name_each_other_are_not_followed_for_ever() -> None:
    """A circle of owners ends in an error, within the bound."""
    async with pair(ClientOptions(patience_seconds=0.05)) as served:
        status = await served.frontends[0].submit("echo", {"text": "x"}, timeout_seconds=None, key=None)
        for frontend, url in zip(served.frontends, reversed(served.urls), strict=True):
            frontend.owned_elsewhere[status.uid] = url
        with pytest.raises(NodeUnreachable, match="in a row named another one"):
            await served.client.attach(status.uid).status()


async def test_an_owner_that_is_no_address_is_told() -> None:
    """What stands where an address should is shown."""
    async with pair() as served:
        status = await served.frontends[0].submit("echo", {"text": "x"}, timeout_seconds=None, key=None)
        served.frontends[0].owned_elsewhere[status.uid] = "ftp://elsewhere"
        with pytest.raises(OnePieceError, match="ftp://elsewhere"):
            await served.client.attach(status.uid).status()


async def test_unknown_is_not_waited_for() -> None:
    """A UID that nobody knows is told at once."""
    async with pair() as served:
        with pytest.raises(UnknownRequest):
            await served.client.attach("01JDWX4T9Z7Q2M3K8V5N6P0R1S").wait()


@pytest.mark.parametrize("urls", ["http://one:1,", "http://one:1,ftp://two:2", ",http://one:1"])
async def test_each_url_must_be_usable(urls: str) -> None:
    """One bad URL among good ones is told, before anything is sent."""
    with pytest.raises(ConfigError):
        async with onepiece.connect(urls):
            pass
