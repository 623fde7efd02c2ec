"""What streams out of the proxy: events and results, whole and in part, and what breaks on the way."""

import json

import anyio
import httpx
import pytest

from onepiece.errors import InvalidInput
from onepiece.log import captured
from onepiece.node.http_events import format_event, parse_last_event_id
from onepiece.node.http_results import Span, parse_range
from onepiece.node.proxy import ProxyOptions
from onepiece.requests import EventKind, RequestEvent
from tests.node.proxy_set import proxy, until

VIDEO = bytes(range(256)) * 300


def blocks(text: str) -> list[dict[str, str]]:
    """The events of a stream, each as its fields."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = [line.partition(": ") for line in block.splitlines() if not line.startswith(":")]
        if lines:
            found.append({name: value for name, _, value in lines})
    return found


async def test_events_come_as_they_happen_and_end_with_the_final_one() -> None:
    """Each has its id, its kind and its JSON; bytes of a preview are in base64 (fault 109)."""
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
    """``Last-Event-ID`` leaves out what the client has; behind the final event there is 204.

    By the specification of server-sent events a browser comes back until it gets that.
    """
    async with proxy() as served:
        uid = await served.submit()
        for step in range(4):
            served.frontend.report(uid, EventKind.PROGRESS, step=step)
        served.frontend.finish(uid, "x")
        path = f"/v1/requests/{uid}/events"
        answer = await served.http.get(path, headers={"Last-Event-ID": "3"})
        assert [event["id"] for event in blocks(answer.text)] == ["4", "5"]
        answer = await served.http.get(path, headers={"Last-Event-ID": "5"})
        assert (answer.status_code, answer.content) == (204, b"")
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
    """A client that vanishes stops its request if it said so; otherwise the request goes on (fault 103)."""
    async with proxy() as served:
        asked, not_asked = await served.submit(), await served.submit()
        for uid, query in ((asked, "?cancel_on_disconnect=1"), (not_asked, "")):
            raw = await served.raw(f"GET /v1/requests/{uid}/events{query} HTTP/1.1")
            await raw.reader.readuntil(b"accepted")
            await raw.close()
        await until(lambda: served.frontend.requests_by_uid[asked].status.state.is_final)
        assert (await served.frontend.status(asked)).state.value == "cancelled"
        assert not (await served.frontend.status(not_asked)).state.is_final


async def test_a_stream_that_ended_cancels_nothing() -> None:
    """A request that finished while its stream was read stays finished."""
    async with proxy() as served:
        uid = await served.submit()
        served.frontend.finish(uid, "x")
        answer = await served.http.get(f"/v1/requests/{uid}/events?cancel_on_disconnect=1")
        assert blocks(answer.text)[-1]["event"] == "finished"
        assert (await served.frontend.status(uid)).state.value == "finished"


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
    """The client sees that the body is not whole, and the result is not purged; the log says why."""
    said: list[tuple[str, str | None]] = []
    async with proxy() as served:
        uid = await served.submit()
        served.frontend.finish(uid, VIDEO, "video/mp4")
        served.frontend.break_result_after = 8192
        with captured(lambda event: said.append((event["event"], event.get("why")))):
            with pytest.raises(httpx.RemoteProtocolError):
                await served.http.get(f"/v1/requests/{uid}/result")
            await until(lambda: bool(said))
        assert said == [("http_response_broken_off", "the store is lost")]
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
