"""The server around the proxy: addresses, ends, bounds."""

import os
import resource
import socket
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from onepiece.errors import ConfigError
from onepiece.node.http_server import _bind
from onepiece.node.http_testing import FakeFrontend
from onepiece.node.proxy import ProxyOptions, build_app, serve
from stages.echo import echo
from tests.node.proxy_set import proxy


def test_small_answers_are_not_held_back() -> None:
    """Nagle's algorithm is off on accepted connections: it would hold an answer's second segment 40 ms."""
    with closing(_bind("127.0.0.1", 0)) as listening:
        listening.setblocking(True)
        with socket.create_connection(listening.getsockname()):
            connection, _ = listening.accept()
            with connection:
                assert connection.proto == socket.IPPROTO_TCP, "asyncio sets TCP_NODELAY only on these"


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


async def test_without_descriptors_a_proxy_is_not_ready() -> None:
    """No connection is accepted then, so a probe over one that is open must turn red; it heals by itself."""
    async with proxy() as served:
        assert (await served.http.get("/readyz")).status_code == 200
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
            answer = await served.http.get("/readyz")
            alive = await served.http.get("/healthz")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (answer.status_code, answer.json()["error"]) == (503, "NotReady")
        assert "out of file descriptors" in answer.json()["message"]
        assert f"may have {lowest_free}," in answer.json()["message"]
        assert alive.status_code == 200
        assert (await served.http.get("/readyz")).status_code == 200


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


async def test_an_unusable_certificate_is_a_named_error(tmp_path: Path) -> None:
    """The file is named."""
    file = tmp_path / "certificate.pem"
    file.write_text("no certificate")
    with pytest.raises(ConfigError, match="certificate"):
        async with serve(build_app(FakeFrontend([echo])), tls_certificate=str(file), tls_key=str(file)):
            pass
