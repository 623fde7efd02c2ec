"""The client against a real HTTP server: what arrives, what is told, what is taken up again."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from attrs import define, frozen

import onepiece
from onepiece import StageContext, Tensor, stage, workflow
from onepiece.client import BlockingClient, Client, ClientOptions
from onepiece.client._sse import BLOCK_BYTES_MAX, EventParser, ServerSentEvent
from onepiece.codec import value_from_bytes
from onepiece.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    NodeUnreachable,
    NotReady,
    OnePieceError,
    Overloaded,
    PayloadTooLarge,
    RequestCancelled,
    ResultGone,
    StageFailed,
    UnknownNode,
    UnknownRequest,
    UnknownWorkflow,
)
from onepiece.node.frontend import NodeView, Readiness
from onepiece.node.http_testing import FakeFrontend
from onepiece.node.proxy import ProxyOptions, build_app, serve
from onepiece.requests import EventKind, RequestState
from stages.echo import echo

PATIENT = ClientOptions(attempts=4, connect_timeout_seconds=5)


@frozen
class Clip:
    """An object of the user's own class."""

    title: str
    frames: Tensor


@stage
async def film(ctx: StageContext[None], frames: Tensor, title: str) -> Clip:
    """Never runs here."""
    return Clip(title, frames)


@workflow
def make_clip(frames: Tensor, title: str = "untitled") -> Clip:
    """Returns an object with a tensor in it."""
    return film(frames, title)


@define
class Set:
    """A served proxy, its frontend, and a client."""

    frontend: FakeFrontend
    client: Client
    url: str


@asynccontextmanager
async def served(options: ClientOptions | None = None, **frontend: Any) -> AsyncIterator[Set]:
    """A proxy on a free port, and a client of it."""
    fake = FakeFrontend([echo, make_clip], **frontend)
    async with serve(build_app(fake, ProxyOptions(keep_alive_seconds=0.2)), shutdown_seconds=2) as port:
        url = f"http://127.0.0.1:{port}"
        async with onepiece.connect(url, options or PATIENT) as client:
            yield Set(fake, client, url)


async def test_a_request_runs_from_submit_to_result() -> None:
    """Inputs arrive, events come in order, the result is the workflow's value, and is then dropped."""
    async with served() as the:
        handle = await the.client.submit(echo(text="ahoy"), timeout=300, key="order-17")
        assert the.frontend.requests_by_uid[handle.uid].inputs == {"text": "ahoy"}
        status = await handle.status()
        assert (status.state, status.key, status.workflow) == (RequestState.ACCEPTED, "order-17", "echo")
        the.frontend.report(handle.uid, EventKind.STAGE_STARTED, "shout")
        the.frontend.report(handle.uid, EventKind.PREVIEW, "shout", content_type="image/png", data=b"\x89P")
        the.frontend.finish(handle.uid, "AHOY!")
        events = [event async for event in handle.events()]
        assert [event.kind.value for event in events] == ["accepted", "stage_started", "preview", "finished"]
        assert events[2].detail["data"] == b"\x89P"
        assert await handle.result() == "AHOY!"
        with pytest.raises(ResultGone):
            await handle.result()


async def test_a_result_may_be_kept_and_fetched_again() -> None:
    """``keep`` leaves it; another client finds it by UID."""
    async with served() as the:
        handle = await the.client.submit("echo", {"text": "ahoy"})
        the.frontend.finish(handle.uid, "AHOY!")
        assert await handle.result(keep=True) == "AHOY!"
        async with onepiece.connect(the.url) as other:
            assert await other.attach(handle.uid).result() == "AHOY!"


@pytest.mark.parametrize("value", [b"", b"\0" * 200_000, "größe" * 1000, None, 7, 1.5, [1, {"a": (2, "b")}]])
async def test_plain_results_come_back_equal(value: Any) -> None:
    """Whatever the size, whatever the type: what the stage returned is what the caller gets."""
    async with served() as the:
        handle = await the.client.submit(echo(text="x"))
        the.frontend.finish(handle.uid, value)
        found = await the.client.attach(handle.uid).result()
        assert found == value
        assert type(found) is type(value)


async def test_bytes_with_a_type_of_their_own_come_back_as_bytes() -> None:
    """A result stored as it is (a video) is not unpacked."""
    async with served() as the:
        handle = await the.client.submit(echo(text="x"))
        the.frontend.finish(handle.uid, b"not packed", "video/mp4")
        assert await the.client.attach(handle.uid).result() == b"not packed"


async def test_tensors_and_objects_travel_both_ways() -> None:
    """Inputs and results keep dtype, shape and bits; objects come back as their class."""
    async with served() as the:
        frames = np.arange(3 * 1000 * 1000, dtype=np.float32).reshape(3, 1000, 1000)
        handle = await the.client.submit(make_clip(frames=frames, title="ship"))
        got = the.frontend.requests_by_uid[handle.uid].inputs["frames"]
        assert (np.asarray(got) == frames).all()
        the.frontend.finish(handle.uid, Clip("ship", frames[::2, :, 5]))
        clip = await handle.result()
        assert isinstance(clip, Clip)
        assert np.array_equal(np.asarray(clip.frames), frames[::2, :, 5])


@pytest.mark.parametrize(
    "error",
    [
        StageFailed("denoise raised ValueError", stage="denoise", traceback="..."),
        DeadlineExceeded("300 s are over"),
        RequestCancelled("by its client"),
        OnePieceError("SomethingNewer: told by a newer proxy"),
    ],
)
async def test_a_failed_request_raises_its_error(error: OnePieceError) -> None:
    """The class, the message and the fields are those that the node gave."""
    async with served() as the:
        handle = await the.client.submit(echo(text="x"))
        the.frontend.fail(handle.uid, error)
        with pytest.raises(type(error)) as caught:
            await handle.result()
        assert type(caught.value) is type(error)
        assert (caught.value.message, caught.value.fields) == (error.message, error.fields)
        assert (await handle.status()).state is RequestState.FAILED


async def test_rejections_are_raised_and_not_repeated() -> None:
    """Each kind by its class, once; a rejection that can be tried again says when."""
    async with served() as the:
        with pytest.raises(UnknownWorkflow, match="make_clip"):
            await the.client.submit("opera", {})
        with pytest.raises(InvalidInput, match="txet"):
            await the.client.submit("echo", {"txet": "x"})
        with pytest.raises(InvalidInput, match="twice"):
            await the.client.submit(echo(text="x"), {"text": "y"})  # type: ignore[call-overload]  # the mistake under test
        the.frontend.rejection = Overloaded("17 in flight", retry_after_seconds=3.5)
        the.frontend.asked_admission.clear()
        with pytest.raises(Overloaded) as caught:
            await the.client.submit(echo(text="x"))
        assert caught.value.fields["retry_after_seconds"] == 3.5
        assert len(the.frontend.asked_admission) == 1


async def test_cancelling_a_request_ends_its_waiters() -> None:
    """``cancel`` is idempotent, gives the status, and wakes whoever waits for the result."""
    async with served() as the:
        handle = await the.client.submit(echo(text="x"))
        waiting = asyncio.ensure_future(handle.result())
        for _ in range(2):
            assert (await handle.cancel()).state is RequestState.CANCELLED
        with pytest.raises(RequestCancelled):
            await waiting


async def test_cancelling_a_waiter_leaves_the_request() -> None:
    """A caller that gives up waiting cancels nothing: the request ends, and its result is there."""
    async with served() as the:
        handle = await the.client.submit(echo(text="x"))
        with anyio.move_on_after(0.05):
            await handle.result()
        assert not (await handle.status()).state.is_final
        the.frontend.finish(handle.uid, "X!")
        assert await handle.result() == "X!"


async def test_leaving_the_events_can_cancel_the_request() -> None:
    """With ``cancel_on_disconnect`` a caller that goes, goes with its request."""
    async with served() as the:
        handle = await the.client.submit(echo(text="x"))
        async with aclosing(handle.events(cancel_on_disconnect=True)) as events:
            assert (await anext(events)).kind is EventKind.ACCEPTED
        with anyio.fail_after(10):
            assert (await handle.wait()).state is RequestState.CANCELLED


async def test_no_name_leads_to_another_path() -> None:
    """What is no UID and no node's name is told here: as part of a path it could mean anything."""
    async with served() as the:
        for text in ("../nodes", "..", "", "a/b", "%2e%2e"):
            with pytest.raises(UnknownRequest, match="no UID"):
                the.client.attach(text)
            for call in (the.client.drain, the.client.resume, the.client.node):
                with pytest.raises(UnknownNode, match="no name of a node"):
                    await call(text)


async def test_unknown_requests_are_told() -> None:
    """A UID that nobody knows, on every method."""
    async with served() as the:
        handle = the.client.attach("0" * 26)
        for call in (handle.status, handle.cancel, handle.wait, handle.result):
            with pytest.raises(UnknownRequest):
                await call()


async def test_nobody_there_is_told_after_a_few_attempts() -> None:
    """A port where nothing listens, by every method; the address is named."""
    async with served() as the:
        url = the.url
    async with onepiece.connect(url, ClientOptions(attempts=2)) as client:
        for call in (
            lambda: client.submit("echo", {"text": "x"}),
            client.nodes,
            client.attach("0" * 26).result,
            lambda: client.wait_ready(0.05),
        ):
            with pytest.raises(NodeUnreachable, match=url):
                await call()


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:80", "http://", "http://h:port", ""])
async def test_an_unusable_url_is_told_at_once(url: str) -> None:
    """Before anything is sent, with an example."""
    with pytest.raises(ConfigError, match="URL"):
        async with onepiece.connect(url):
            pass


async def test_lists_are_typed() -> None:
    """Requests, workflows and nodes come as objects; bounds are the proxy's."""
    async with served() as the:
        handle = await the.client.submit(echo(text="x"))
        (status,) = await the.client.requests(limit=5, state="accepted")
        assert status.uid == handle.uid
        with pytest.raises(InvalidInput, match="limit"):
            await the.client.requests(limit=0)
        described = {each.name: each for each in await the.client.workflows()}
        assert [each.name for each in described["make_clip"].inputs] == ["frames", "title"]
        assert described["make_clip"].inputs[1].default == "untitled"
        the.frontend.node_views = [
            NodeView("n1", 3, "tcp://h:1", None, ["worker"], "alive", ["cpu:0"], [], 42, 0.5)
        ]
        (node,) = await the.client.nodes()
        assert (node.node, node.devices, node.process_id) == ("n1", ["cpu:0"], 42)


async def test_waiting_for_readiness() -> None:
    """It returns when the set is ready, and tells what was missing when time is over."""
    async with served() as the:
        the.frontend.readiness_now = Readiness(False, True, False, ["echo/shout is loading on n2"])
        with pytest.raises(NotReady, match="echo/shout is loading"):
            await the.client.wait_ready(0.1)
        waiting = asyncio.ensure_future(the.client.wait_ready(10))
        await asyncio.sleep(0)
        the.frontend.readiness_now = Readiness(True, True, False, [])
        await waiting


async def test_a_result_that_is_announced_late_is_waited_for() -> None:
    """The final event may reach a client before the store's word reaches the proxy."""
    async with served() as the:
        handle = await the.client.submit(echo(text="x"))
        the.frontend.finish(handle.uid, "X!")
        request = the.frontend.requests_by_uid[handle.uid]
        data, request.data = request.data, None
        waiting = asyncio.ensure_future(handle.result())
        await handle.wait()
        request.data = data
        assert await waiting == "X!"


async def test_a_result_too_large_for_memory_is_refused_and_can_be_saved(tmp_path: Path) -> None:
    """The bound is named, nothing of it is read, and ``save`` has none."""
    async with served(ClientOptions(result_bytes_max=1000)) as the:
        handle = await the.client.submit(echo(text="x"))
        the.frontend.finish(handle.uid, bytes(5000), "video/mp4")
        with pytest.raises(PayloadTooLarge, match=r"1000.*save"):
            await handle.result()
        assert await handle.save(tmp_path / "clip.mp4") == 5000


def names(directory: Path) -> list[str]:
    """The files in a directory."""
    return [path.name for path in directory.iterdir()]


@pytest.mark.parametrize("value", [b"", b"short", bytes(range(256)) * 1000, "text", "größe\n" * 1000])
async def test_bytes_and_texts_are_saved_bare(tmp_path: Path, value: Any) -> None:
    """The file holds the value's own bytes, and nothing else is left beside it."""
    async with served() as the:
        handle = await the.client.submit(echo(text="x"))
        the.frontend.finish(handle.uid, value)
        expected = value if isinstance(value, bytes) else value.encode()
        path = tmp_path / "result"
        assert await handle.save(path) == len(expected)
        assert path.read_bytes() == expected
        assert names(tmp_path) == [path.name]


async def test_other_values_are_saved_as_they_travel(tmp_path: Path) -> None:
    """A tensor's file can be read with the codec."""
    async with served() as the:
        handle = await the.client.submit(echo(text="x"))
        the.frontend.finish(handle.uid, np.arange(5))
        await handle.save(tmp_path / "value")
        found = value_from_bytes((tmp_path / "value").read_bytes())
        assert np.array_equal(np.asarray(found), np.arange(5))


async def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    """The file that it names gets the result, there or not; the link is what it was."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "old").write_bytes(b"old")
    async with served() as the:
        for name in ("old", "new"):
            handle = await the.client.submit(echo(text="x"))
            the.frontend.finish(handle.uid, b"result")
            link = tmp_path / name
            link.symlink_to(Path("elsewhere") / name)
            assert await handle.save(link) == 6
            assert link.is_symlink()
            assert (tmp_path / "elsewhere" / name).read_bytes() == b"result"
    assert sorted(names(tmp_path / "elsewhere")) == ["new", "old"]


async def test_a_named_pipe_is_written_to(tmp_path: Path) -> None:
    """Its reader gets the whole result, also one that comes late, and the pipe stays a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = bytes(range(256)) * 1000
    async with served() as the, anyio.create_task_group() as tasks:
        handle = await the.client.submit(echo(text="x"))
        the.frontend.finish(handle.uid, data)
        tasks.start_soon(handle.save, pipe)
        await anyio.lowlevel.checkpoint()
        assert await anyio.Path(pipe).read_bytes() == data
    assert pipe.is_fifo()
    assert names(tmp_path) == ["pipe"]


async def test_a_device_that_takes_no_more_keeps_the_result() -> None:
    """The error is told, the device stays, and the result is still there to be fetched."""
    async with served() as the:
        handle = await the.client.submit(echo(text="x"))
        the.frontend.finish(handle.uid, b"result")
        with pytest.raises(OSError, match="No space left"):
            await handle.save("/dev/full")
        assert await anyio.Path("/dev/full").is_char_device()
        assert await handle.save("/dev/null", keep=True) == 6
        assert await anyio.Path("/dev/null").is_char_device()
        assert await the.client.attach(handle.uid).result() == b"result"


async def test_what_is_open_is_written_on(tmp_path: Path) -> None:
    """/dev/stdout may stand for a file to which others have written: it goes on behind that."""
    with (tmp_path / "log").open("ab", buffering=0) as log:
        log.write(b"before ")
        async with served() as the:
            handle = await the.client.submit(echo(text="x"))
            the.frontend.finish(handle.uid, b"result")
            await handle.save(f"/dev/fd/{log.fileno()}")
    assert (tmp_path / "log").read_bytes() == b"before result"


async def test_a_failed_save_leaves_no_file(tmp_path: Path) -> None:
    """Neither the file nor its part is there when the request failed."""
    async with served() as the:
        handle = await the.client.submit(echo(text="x"))
        the.frontend.fail(handle.uid, StageFailed("no"))
        with pytest.raises(StageFailed):
            await handle.save(tmp_path / "clip.mp4")
        with pytest.raises(FileNotFoundError):
            await (await the.client.submit(echo(text="x"))).save(tmp_path / "nowhere" / "clip.mp4")
        assert not names(tmp_path)


async def test_a_broken_fetch_goes_on_where_it_broke() -> None:
    """The store's connection is lost amid a result: the rest is fetched by range, and all of it is right."""
    async with served() as the:
        value = bytes(range(256)) * 400
        handle = await the.client.submit(echo(text="x"))
        the.frontend.finish(handle.uid, value, "video/mp4")
        the.frontend.break_result_after = 40960
        assert await the.client.attach(handle.uid).result() == value


@pytest.mark.parametrize("key", [5, "", "größe", "a\nb", " k", "k" * 257])
async def test_what_can_be_no_key_is_named(key: Any) -> None:
    """Before anything is sent, and as an error of ours."""
    async with served() as the:
        with pytest.raises(InvalidInput, match="key"):
            await the.client.submit(echo(text="x"), key=key)
        with pytest.raises(InvalidInput, match="timeout"):
            await the.client.submit(echo(text="x"), timeout="soon")  # type: ignore[call-overload]  # what is tested
        assert not the.frontend.requests_by_uid


async def test_a_closed_client_says_so() -> None:
    """Both clients, as an error of ours, for whatever is asked of them."""
    async with served() as the:
        async with onepiece.connect(the.url) as client:
            handle = await client.submit(echo(text="x"))
        with pytest.raises(OnePieceError, match="the client is closed"):
            await client.submit(echo(text="x"))
        with pytest.raises(OnePieceError, match="the client is closed"):
            await handle.status()

        def use() -> None:
            with onepiece.connect_blocking(the.url) as blocking:
                handle = blocking.attach("0" * 26)
            for call in (blocking.nodes, lambda: blocking.submit(echo(text="x")), handle.status):
                with pytest.raises(OnePieceError, match="cannot be used here"):
                    call()

        await anyio.to_thread.run_sync(use)


async def test_the_blocking_twin_does_the_same(tmp_path: Path) -> None:
    """Every method, from a thread that has no event loop."""
    async with served(answer=lambda workflow, inputs: f"{inputs['text'].upper()}!") as the:
        the.frontend.node_views = [NodeView("n1", 1, "tcp://h:1", None, [], "alive", [], [], 1, 0.0)]

        def use() -> None:
            with onepiece.connect_blocking(the.url) as client:
                use_blocking(client, tmp_path)

        await anyio.to_thread.run_sync(use)


def use_blocking(client: BlockingClient, directory: Path) -> None:
    """All that a blocking client can do."""
    client.wait_ready(10)
    handle = client.submit(echo(text="ahoy"), timeout=5, key="k")
    assert client.submit("echo", {"text": "ahoy"}, key="k").uid == handle.uid
    assert [event.kind.value for event in handle.events()] == ["accepted", "finished"]
    events = handle.events()
    assert next(events).sequence == 0
    assert isinstance(events, Iterator)
    events.close()  # type: ignore[attr-defined]  # leaving a loop does this
    assert handle.wait().state is RequestState.FINISHED
    assert handle.save(directory / "result", keep=True) == 5
    assert client.attach(handle.uid).result() == "AHOY!"
    with pytest.raises(ResultGone):
        handle.result()
    assert handle.status().uid == handle.uid
    assert handle.cancel().state is RequestState.FINISHED
    assert [each.uid for each in client.requests()] == [handle.uid]
    assert {each.name for each in client.workflows()} == {"echo", "make_clip"}
    assert [each.node for each in client.nodes()] == ["n1"]


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_events_are_parsed_from_any_pieces(step: int) -> None:
    """However a stream is cut, its events are the same; comments and other fields are passed over."""
    text = "retry: 5\n: hello\n\nid: 1\ndata: a\ndata:b\n\nevent: x\r\nid: 2\r\ndata: größe\r\n\r\n"
    data = f"{text}: bye\n\ndata: cut".encode()
    parser = EventParser()
    found = [
        event for start in range(0, len(data), step) for event in parser.feed(data[start : start + step])
    ]
    assert found == [ServerSentEvent("a\nb", "1"), ServerSentEvent("größe", "2")]


def test_an_event_without_end_is_refused() -> None:
    """A server that is no proxy cannot fill our memory."""
    parser = EventParser()
    piece = b"x" * (1 << 20)
    for _ in range(BLOCK_BYTES_MAX >> 20):
        assert not list(parser.feed(piece))
    with pytest.raises(OnePieceError, match="proxy"):
        list(parser.feed(piece))
