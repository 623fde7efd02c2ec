"""What streams through the proxy: bodies in, events and results out, and what breaks on the way."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import anyio
import httpx
import pytest
from attrs import define

from onepiece.errors import ConfigError, InvalidInput, Overloaded
from onepiece.node.http_events import format_event, parse_last_event_id
from onepiece.node.http_options import BodyBudget
from onepiece.node.http_results import Span, parse_range
from onepiece.node.http_server import _bind
from onepiece.node.http_testing import FakeFrontend
from onepiece.node.proxy import ProxyOptions, build_app, serve
from onepiece.requests import EventKind, RequestEvent
from stages.echo import echo

VIDEO = bytes(range(256)) * 300


@define
class Proxy:
    """A served proxy and its frontend."""

    frontend: FakeFrontend
    http: httpx.AsyncClient
    port: int

    async def submit(self) -> str:
        """Submit a request; its UID."""
        answer = await self.http.post("/v1/requests", json={"workflow": "echo", "inputs": {"text": "ahoy"}})
        uid: str = answer.json()["uid"]
        return uid

    async def raw(self, text: str, body: bytes = b"") -> "Raw":
        """Open a connection and send these lines of a request, with a Host."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = "\r\n".join([*text.splitlines(), "Host: proxy", "", ""])
        writer.write(head.encode() + body)
        await writer.drain()
        return Raw(reader, writer)


@define
class Raw:
    """A connection below HTTP."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self) -> tuple[int, str]:
        """The status and the rest of what comes until the end or the next pause in an answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status = int(head.split()[1])
        length = next(
            (
                int(line.split(":")[1])
                for line in head.splitlines()
                if line.lower().startswith("content-length")
            ),
            0,
        )
        return status, head + (await self.reader.readexactly(length)).decode()

    async def close(self) -> None:
        """Drop the connection."""
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


@asynccontextmanager
async def proxy(options: ProxyOptions | None = None) -> AsyncIterator[Proxy]:
    """A proxy on a free port of the loopback."""
    frontend = FakeFrontend([echo])
    async with (
        serve(build_app(frontend, options), shutdown_seconds=2) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False) as http,
    ):
        yield Proxy(frontend, http, port)


async def until(condition: Any) -> None:
    """Wait for a condition, for ten seconds at most."""
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - any condition, also one without an event
            await asyncio.sleep(0.005)


def blocks(text: str) -> list[dict[str, str]]:
    """The events of a stream, each as its fields."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = [line.partition(": ") for line in block.splitlines() if not line.startswith(":")]
        if lines:
            found.append({name: value for name, _, value in lines})
    return found


async def test_events_come_as_they_happen_and_end_with_the_final_one() -> None:
    """Each has its id, its kind and its JSON; bytes of a preview are in base64."""
    async with proxy() as served:
        uid = await served.submit()
        async with served.http.stream("GET", f"/v1/requests/{uid}/events") as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            lines = answer.aiter_lines()
            assert await anext(lines) == "id: 0"
            served.frontend.report(uid, EventKind.PREVIEW, stage="shout", data=b"\0\1")
            served.frontend.finish(uid, "AHOY!")
            rest = "\n".join(["id: 0", *[line async for line in lines]])
        events = blocks(rest)
        assert [event["event"] for event in events] == ["accepted", "preview", "finished"]
        assert [event["id"] for event in events] == ["0", "1", "2"]
        assert json.loads(events[1]["data"])["detail"] == {"data": {"$base64": "AAE="}}
        assert json.loads(events[1]["data"])["stage"] == "shout"


async def test_events_resume_behind_the_last_one_that_was_seen() -> None:
    """``Last-Event-ID`` leaves out what the client has; behind the final event the stream is empty."""
    async with proxy() as served:
        uid = await served.submit()
        for step in range(4):
            served.frontend.report(uid, EventKind.PROGRESS, step=step)
        served.frontend.finish(uid, "x")
        path = f"/v1/requests/{uid}/events"
        answer = await served.http.get(path, headers={"Last-Event-ID": "3"})
        assert [event["id"] for event in blocks(answer.text)] == ["4", "5"]
        answer = await served.http.get(path, headers={"Last-Event-ID": "5"})
        assert blocks(answer.text) == []
        answer = await served.http.get(path, headers={"Last-Event-ID": "x"})
        assert answer.json()["fields"]["field"] == "Last-Event-ID"


async def test_a_silent_stream_is_kept_alive() -> None:
    """Comments come while nothing happens, and the events after them are whole."""
    async with proxy(ProxyOptions(keep_alive_seconds=0.02)) as served:
        uid = await served.submit()
        async with served.http.stream("GET", f"/v1/requests/{uid}/events") as answer:
            seen = ""
            with anyio.fail_after(10):
                async for text in answer.aiter_text():
                    seen += text
                    if seen.count(": keep-alive\n\n") >= 3:
                        served.frontend.finish(uid, "x")
                    if "finished" in seen:
                        break
        assert [event["event"] for event in blocks(seen)] == ["accepted", "finished"]


async def test_leaving_a_stream_cancels_only_where_it_was_asked_for() -> None:
    """A client that vanishes stops its request if it said so; otherwise the request goes on."""
    async with proxy() as served:
        asked, not_asked = await served.submit(), await served.submit()
        for uid, query in ((asked, "?cancel_on_disconnect=1"), (not_asked, "")):
            raw = await served.raw(f"GET /v1/requests/{uid}/events{query} HTTP/1.1")
            await raw.reader.readuntil(b"accepted")
            await raw.close()
        await until(lambda: served.frontend.status(asked).state.is_final)
        assert served.frontend.status(asked).state.value == "cancelled"
        assert not served.frontend.status(not_asked).state.is_final


async def test_a_stream_that_ended_cancels_nothing() -> None:
    """A request that finished while its stream was read stays finished."""
    async with proxy() as served:
        uid = await served.submit()
        served.frontend.finish(uid, "x")
        answer = await served.http.get(f"/v1/requests/{uid}/events?cancel_on_disconnect=1")
        assert blocks(answer.text)[-1]["event"] == "finished"
        assert served.frontend.status(uid).state.value == "finished"


async def test_a_result_is_fetched_once_unless_it_is_kept() -> None:
    """A whole fetch purges, ``keep`` and HEAD do not; what is gone is 410."""
    async with proxy() as served:
        uid = await served.submit()
        path = f"/v1/requests/{uid}/result"
        answer = await served.http.get(path)
        assert (answer.status_code, answer.json()["error"]) == (503, "NotReady")
        served.frontend.finish(uid, VIDEO, "video/mp4")
        head = await served.http.head(path)
        assert (head.headers["Content-Length"], head.headers["Content-Type"]) == (
            str(len(VIDEO)),
            "video/mp4",
        )
        for query in ("?keep=1", "?keep=true", "?keep=0"):
            answer = await served.http.get(path + query)
            assert answer.content == VIDEO
            assert answer.headers["Content-Type"] == "video/mp4"
        await until(lambda: served.frontend.requests_by_uid[uid].is_purged)
        answer = await served.http.get(path)
        assert (answer.status_code, answer.json()["error"]) == (410, "ResultGone")


async def test_a_result_is_dropped_by_delete() -> None:
    """What our client does when it has the whole: idempotent, with nothing to say."""
    async with proxy() as served:
        uid = await served.submit()
        served.frontend.finish(uid, VIDEO, "video/mp4")
        for _ in range(2):
            assert (await served.http.delete(f"/v1/requests/{uid}/result")).status_code == 204
        assert served.frontend.requests_by_uid[uid].is_purged


@pytest.mark.parametrize(
    ("wanted", "status", "span"),
    [
        ("bytes=0-99", 206, (0, 100)),
        ("bytes=5000-", 206, (5000, len(VIDEO))),
        ("bytes=-10", 206, (len(VIDEO) - 10, len(VIDEO))),
        ("bytes=10-999999999", 206, (10, len(VIDEO))),
        ("bytes=0-9,20-29", 200, (0, len(VIDEO))),
        ("bytes=9-3", 200, (0, len(VIDEO))),
        ("frames=1-2", 200, (0, len(VIDEO))),
        ("bytes=-", 200, (0, len(VIDEO))),
    ],
)
async def test_a_range_of_the_result(wanted: str, status: int, span: tuple[int, int]) -> None:
    """Ranges are served as they are asked for, odd ones ignored; a part that was fetched purges nothing."""
    async with proxy() as served:
        uid = await served.submit()
        served.frontend.finish(uid, VIDEO, "video/mp4")
        path = f"/v1/requests/{uid}/result" + ("?keep=1" if status == 200 else "")
        answer = await served.http.get(path, headers={"Range": wanted})
        assert answer.status_code == status
        assert answer.content == VIDEO[slice(*span)]
        if status == 206:
            assert answer.headers["Content-Range"] == f"bytes {span[0]}-{span[1] - 1}/{len(VIDEO)}"
        assert not served.frontend.requests_by_uid[uid].is_purged


async def test_a_range_behind_the_end_is_not_satisfiable() -> None:
    """416 names the size; a range for another version of the result gives the whole."""
    async with proxy() as served:
        uid = await served.submit()
        served.frontend.finish(uid, VIDEO, "video/mp4")
        path = f"/v1/requests/{uid}/result?keep=1"
        answer = await served.http.get(path, headers={"Range": f"bytes={len(VIDEO)}-"})
        assert answer.status_code == 416
        assert answer.headers["Content-Range"] == f"bytes */{len(VIDEO)}"
        answer = await served.http.get(path, headers={"Range": "bytes=0-9", "If-Range": '"other"'})
        assert answer.content == VIDEO


@pytest.mark.parametrize(
    ("text", "total", "expected"),
    [
        (None, 5, None),
        ("bytes=1-3", 5, Span(1, 4)),
        ("bytes=-9", 5, Span(0, 5)),
        ("bytes= 1-3", 5, None),
        (f"bytes={'9' * 40}-", 5, None),
    ],
)
def test_ranges_are_parsed(text: str | None, total: int, expected: Span | None) -> None:
    """What is no single range is none; nothing is asked of numbers without bound."""
    assert parse_range(text, total) == expected


async def test_a_store_lost_amid_a_result_breaks_the_connection() -> None:
    """The client sees that the body is not whole, and the result is not purged."""
    async with proxy() as served:
        uid = await served.submit()
        served.frontend.finish(uid, VIDEO, "video/mp4")
        served.frontend.break_result_after = 8192
        with pytest.raises(httpx.RemoteProtocolError):
            await served.http.get(f"/v1/requests/{uid}/result")
        assert not served.frontend.requests_by_uid[uid].is_purged
        assert (await served.http.get(f"/v1/requests/{uid}/result")).content == VIDEO


async def test_a_client_that_leaves_amid_a_result_does_not_purge_it() -> None:
    """Only a whole that was sent counts as fetched."""
    async with proxy() as served:
        uid = await served.submit()
        large = bytes(32 << 20)
        served.frontend.finish(uid, large, "video/mp4")
        raw = await served.raw(f"GET /v1/requests/{uid}/result HTTP/1.1")
        await raw.reader.readexactly(10_000)
        await raw.close()
        answer = await served.http.get(f"/v1/requests/{uid}/result", headers={"Range": "bytes=0-9"})
        assert answer.status_code == 206
        assert not served.frontend.requests_by_uid[uid].is_purged


async def test_overload_is_told_before_the_body_is_read() -> None:
    """50 MB are announced, none is sent, and the rejection is there; a client that waits may keep them."""
    async with proxy() as served:
        served.frontend.rejection = Overloaded("17 in flight")
        for extra in ("", "\nExpect: 100-continue"):
            raw = await served.raw(
                "POST /v1/requests?workflow=echo HTTP/1.1\nContent-Type: multipart/form-data; boundary=b\n"
                f"Content-Length: 52428800{extra}"
            )
            status, text = await raw.answer()
            assert status == 429
            assert "Overloaded" in text
            assert "100 Continue" not in text
            await raw.close()
        assert served.frontend.asked_admission[-1] == ("echo", 52428800)


async def test_a_client_that_waits_to_continue_is_told_to() -> None:
    """A body that is wanted is asked for, and the request is accepted."""
    async with proxy() as served:
        body = b'{"inputs": {"text": "ahoy"}}'
        raw = await served.raw(
            "POST /v1/requests?workflow=echo HTTP/1.1\nContent-Type: application/json\n"
            f"Content-Length: {len(body)}\nExpect: 100-continue"
        )
        assert await raw.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        raw.writer.write(body)
        assert (await raw.answer())[0] == 202
        await raw.close()


def test_small_answers_are_not_held_back() -> None:
    """Nagle's algorithm is off on accepted connections: it would hold an answer's second segment 40 ms."""
    with closing(_bind("127.0.0.1", 0)) as listening:
        listening.setblocking(True)
        with socket.create_connection(listening.getsockname()):
            connection, _ = listening.accept()
            with connection:
                assert connection.proto == socket.IPPROTO_TCP, "asyncio sets TCP_NODELAY only on these"


async def test_a_client_that_writes_before_it_reads_gets_to_see_the_rejection() -> None:
    """The body of a rejected request is read away, so that the answer arrives and not a reset."""
    async with proxy() as served:
        served.frontend.rejection = Overloaded("17 in flight")
        answer = await served.http.post("/v1/requests?workflow=echo", files={"text": ("f", bytes(40 << 20))})
        assert answer.status_code == 429
        served.frontend.rejection = None
        await served.submit()


async def test_a_form_is_rejected_by_its_request_field_before_its_files() -> None:
    """Without ``?workflow=`` the JSON field decides as soon as it is there."""
    async with proxy() as served:
        served.frontend.rejection = Overloaded("17 in flight")
        body = b'--b\r\nContent-Disposition: form-data; name="request"\r\n\r\n{"workflow": "echo"}\r\n--b\r\n'
        raw = await served.raw(
            "POST /v1/requests HTTP/1.1\nContent-Type: multipart/form-data; boundary=b\n"
            "Content-Length: 52428800",
            body,
        )
        assert (await raw.answer())[0] == 429
        await raw.close()


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data; boundary=b"])
async def test_a_body_beyond_its_bound_is_refused_by_its_length(content_type: str) -> None:
    """The announced length is enough; the bound is named, and the connection ends."""
    options = ProxyOptions(body_bytes_max=1 << 20, discard_bytes_max=1 << 20)
    async with proxy(options) as served:
        raw = await served.raw(
            f"POST /v1/requests HTTP/1.1\nContent-Type: {content_type}\nContent-Length: {1 << 40}"
        )
        status, text = await raw.answer()
        assert status == 413
        assert "1048576" in text
        assert "connection: close" in text.lower()
        await raw.close()
        await served.submit()


async def test_a_body_without_a_length_is_counted() -> None:
    """A chunked body that never ends is refused when it exceeds the bound."""
    async with proxy(ProxyOptions(body_bytes_max=1 << 20)) as served:
        raw = await served.raw(
            "POST /v1/requests HTTP/1.1\nContent-Type: application/json\nTransfer-Encoding: chunked"
        )
        answering = asyncio.ensure_future(raw.answer())
        while not answering.done():
            raw.writer.write(b"10000\r\n%b\r\n" % bytes(0x10000))
            await raw.writer.drain()
        status, text = await answering
        assert status == 413
        assert "1048576" in text
        await raw.close()


async def test_a_length_that_is_no_number_is_refused() -> None:
    """Whoever parses it first, nothing is read."""
    async with proxy() as served:
        raw = await served.raw(
            "POST /v1/requests HTTP/1.1\nContent-Type: application/json\nContent-Length: many"
        )
        head = await raw.reader.readuntil(b"\r\n")
        assert b" 4" in head
        await raw.close()


async def test_a_body_that_does_not_arrive_is_given_up() -> None:
    """A client that announces a body and falls silent is told so, and its room is free again."""
    async with proxy(ProxyOptions(body_timeout_seconds=0.05)) as served:
        raw = await served.raw(
            "POST /v1/requests HTTP/1.1\nContent-Type: application/json\nContent-Length: 100"
        )
        status, text = await raw.answer()
        assert status == 422
        assert "did not arrive" in text
        await raw.close()


def test_bodies_share_a_budget() -> None:
    """What all bodies take together is bounded; room comes back also after an error."""
    budget = BodyBudget(100)
    with budget.take(60):
        with pytest.raises(Overloaded, match="60 of 100"), budget.take(41):
            pass
        with pytest.raises(InvalidInput), budget.take(40):
            raise InvalidInput("the body was no JSON")
        assert budget.in_use == 60
    assert budget.in_use == 0


async def test_requests_in_progress_are_bounded() -> None:
    """One stream too many is told so, and served when another one has ended."""
    async with proxy(ProxyOptions(requests_max=1)) as served:
        uid = await served.submit()
        async with served.http.stream("GET", f"/v1/requests/{uid}/events") as answer:
            assert answer.status_code == 200
            refused = await served.http.get("/v1/workflows")
            assert (refused.status_code, refused.json()["error"]) == (429, "Overloaded")
            served.frontend.finish(uid, "x")
            await answer.aread()
        answer = await served.http.get("/v1/workflows")
        assert answer.status_code == 200


async def test_leaving_the_server_ends_its_streams() -> None:
    """An open stream of events does not hold up a stop; the client sees its end, and comes back later."""
    frontend = FakeFrontend([echo])
    async with httpx.AsyncClient(trust_env=False, verify=False) as http:
        async with serve(build_app(frontend), shutdown_seconds=30) as port:
            base = f"http://127.0.0.1:{port}"
            answer = await http.post(
                f"{base}/v1/requests", json={"workflow": "echo", "inputs": {"text": "x"}}
            )
            request = http.build_request("GET", f"{base}/v1/requests/{answer.json()['uid']}/events")
            stream = await http.send(request, stream=True)
            lines = stream.aiter_lines()
            assert await anext(lines) == "id: 0"
        rest = [line async for line in lines]
        assert "finished" not in "".join(rest)
        await stream.aclose()


async def test_a_port_in_use_is_a_named_error() -> None:
    """The address and what to do are named, and the port can be used when it is free again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}.*port 0"):
            async with serve(build_app(FakeFrontend([echo])), port=port):
                pass
    async with serve(build_app(FakeFrontend([echo])), port=port) as bound:
        assert bound == port


@pytest.mark.parametrize(("host", "port"), [("203.0.113.7", 0), ("127.0.0.1", 70000), ("nowhere.invalid", 0)])
async def test_an_address_that_is_none_of_ours_is_a_named_error(host: str, port: int) -> None:
    """Whatever is wrong with an address is the operator's to read."""
    with pytest.raises(ConfigError, match="cannot listen"):
        async with serve(build_app(FakeFrontend([echo])), host, port):
            pass


async def test_an_unusable_certificate_is_a_named_error(tmp_path: Any) -> None:
    """The file is named."""
    file = tmp_path / "certificate.pem"
    file.write_text("no certificate")
    with pytest.raises(ConfigError, match="certificate"):
        async with serve(build_app(FakeFrontend([echo])), tls_certificate=str(file), tls_key=str(file)):
            pass


@pytest.mark.parametrize(
    "options", [{"body_bytes_max": 0}, {"requests_max": -1}, {"bodies_bytes_max": 5, "body_bytes_max": 6}]
)
def test_bounds_that_cannot_be_are_named(options: dict[str, int]) -> None:
    """Each option is checked by its name."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        ProxyOptions(**options)


def test_an_event_is_one_block_whatever_it_holds() -> None:
    """Line breaks in an error's message do not end the block."""
    event = RequestEvent("u", 3, EventKind.FAILED, 1.5, "s", "n", {"message": "a\nb\r\n\nc"})
    text = format_event(event).decode()
    assert text.count("\n\n") == 1
    assert text.endswith("\n\n")
    assert json.loads(blocks(text)[0]["data"])["detail"]["message"] == "a\nb\r\n\nc"


@pytest.mark.parametrize("text", ["", "-1", "1.5", "\u0661", "9" * 19])
def test_a_last_event_id_is_a_sequence(text: str) -> None:
    """Anything else is named, rather than taken for the beginning."""
    with pytest.raises(InvalidInput, match="Last-Event-ID"):
        parse_last_event_id(text)
