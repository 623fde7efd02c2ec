"""Bodies on their way into the proxy: bounded before they are read, rejected so that it can be seen."""

import asyncio
from typing import Any

import pytest

from onepiece.errors import ConfigError, InvalidInput, Overloaded
from onepiece.node.http_options import BodyBudget
from onepiece.node.proxy import ProxyOptions
from tests.node.proxy_set import proxy


async def test_overload_is_told_before_the_body_is_read() -> None:
    """50 MB are announced, none is sent, and the rejection is there; who waits may keep them (fault 83)."""
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


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_a_client_that_writes_before_it_reads_gets_to_see_the_rejection(connection: str) -> None:
    """The body of a rejected request is read away, so that the answer arrives and not a reset.

    Also where the client wants the connection closed, as many small ones do.
    """
    async with proxy() as served:
        served.frontend.rejection = Overloaded("17 in flight")
        answer = await served.http.post(
            "/v1/requests?workflow=echo",
            files={"text": ("f", bytes(40 << 20))},
            headers={"Connection": connection},
        )
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


@pytest.mark.parametrize(
    "options", [{"body_bytes_max": 0}, {"requests_max": -1}, {"bodies_bytes_max": 5, "body_bytes_max": 6}]
)
def test_bounds_that_cannot_be_are_named(options: dict[str, Any]) -> None:
    """Each option is checked by its name."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        ProxyOptions(**options)
