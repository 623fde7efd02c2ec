"""Admission over HTTP: places before bodies, terms in headers, other sets; and a real node that is full."""

from pathlib import Path

import httpx
import pytest

import onepiece
from onepiece.client import ClientOptions
from onepiece.errors import ConfigError, InvalidInput, Overloaded
from onepiece.node.http_testing import FakeFrontend
from onepiece.node.node import open_node
from onepiece.node.options import NodeOptions, read_options, weights_of
from onepiece.node.proxy import ProxyOptions, build_app, serve
from onepiece.node.stopping import StopSignal
from onepiece.requests import Terms
from stages.echo import echo
from tests.node import waiting_stages
from tests.node.in_process import ended, open_nodes, proxy_of
from tests.node.proxy_set import proxy, until
from transports import Address

_PLAIN = Terms()


async def test_a_place_is_taken_before_the_body_and_left_if_nothing_comes_of_it() -> None:
    """While a body arrives its request has a place, and leaves it if nothing comes of it (fault 83)."""
    async with proxy() as served:
        frontend = served.frontend
        head = "POST /v1/requests?workflow=echo HTTP/1.1\nContent-Type: application/json\nContent-Length: 28"
        raw = await served.raw(head, b'{"inputs"')
        await until(lambda: bool(frontend.places))
        await raw.close()
        await until(lambda: not frontend.places)
        raw = await served.raw(head, b'{"inputs": {"text": ahoy}}  ')
        assert (await raw.answer())[0] == 422
        await raw.close()
        assert not frontend.places
        raw = await served.raw(head, b'{"inputs": {"text": "ahoy"}}')
        assert (await raw.answer())[0] == 202
        await raw.close()
        assert not frontend.places  # it is the request's now
        assert len(frontend.requests_by_uid) == 1


async def test_a_request_that_is_known_needs_no_place() -> None:
    """The answer got lost, and meanwhile the set is full: the same key still gives the request."""
    async with proxy() as served:
        answers = []
        for _ in range(2):
            answers.append(
                await served.http.post(
                    "/v1/requests?workflow=echo",
                    json={"inputs": {"text": "ahoy"}},
                    headers={"Idempotency-Key": "order-17"},
                )
            )
            served.frontend.rejection = Overloaded("17 in flight")
        assert [answer.status_code for answer in answers] == [202, 202]
        assert answers[0].json()["uid"] == answers[1].json()["uid"]


async def test_terms_come_in_headers() -> None:
    """Tenant, priority and size class reach the door with the workflow; what cannot be is named."""
    async with proxy() as served:
        headers = {"OnePiece-Tenant": "gold", "OnePiece-Priority": "-1", "OnePiece-Size-Class": "480p"}
        url, body = "/v1/requests?workflow=echo", {"inputs": {"text": "ahoy"}}
        assert (await served.http.post(url, json=body, headers=headers)).status_code == 202
        assert (await served.http.post(url, json=body)).status_code == 202
        assert served.frontend.asked_terms == [Terms("gold", -1, "480p"), _PLAIN]
        for name, text, named in (
            ("OnePiece-Priority", "3", "priority"),
            ("OnePiece-Priority", "high", "priority"),
            ("OnePiece-Tenant", "t" * 200, "tenant"),
            ("OnePiece-Size-Class", "s" * 100, "size_class"),
        ):
            answer = await served.http.post(url, json=body, headers={name: text})
            assert answer.status_code == 422
            assert answer.json()["fields"]["field"] == named


async def test_what_a_client_says_of_its_requests_arrives() -> None:
    """The Python client's tenant, priority and size class; what cannot be is refused before it is sent."""
    frontend = FakeFrontend([echo])
    async with serve(build_app(frontend)) as port:
        options = ClientOptions(tenant="gold")
        async with onepiece.connect(f"http://127.0.0.1:{port}", options) as client:
            await client.submit(echo(text="x"), priority=2, size_class="720p")
            with pytest.raises(InvalidInput, match="priority"):
                await client.submit(echo(text="x"), priority=3)
            assert (await client.admission()) == {"in_flight": 0}
    assert frontend.asked_terms == [Terms("gold", 2, "720p")]


async def test_a_client_turns_to_the_other_set() -> None:
    """What one set refuses another takes, with the same key; the handle asks that one from then on."""
    full, free = FakeFrontend([echo]), FakeFrontend([echo])
    async with serve(build_app(full)) as here, serve(build_app(free)) as there:
        url, other = f"http://127.0.0.1:{here}", f"http://127.0.0.1:{there}"
        full.rejection = Overloaded("it is full", elsewhere=["http://127.0.0.1:1", other])
        quick = ClientOptions(attempts=1)
        async with onepiece.connect(url, quick) as client:
            handle = await client.submit(echo(text="x"), key="order-17")
            assert handle.url == other
            [request] = free.requests_by_uid.values()
            assert (request.status.uid, request.status.key) == (handle.uid, "order-17")
            free.finish(handle.uid, "X!")
            assert await handle.result() == "X!"
            free.rejection = Overloaded("it is full, too", elsewhere=[url])
            with pytest.raises(Overloaded, match=r"it is full$"):
                await client.submit(echo(text="x"))
        patient = ClientOptions(tries_other_sets=False)
        asked = len(free.asked_admission)
        async with onepiece.connect(url, patient) as client:
            with pytest.raises(Overloaded):
                await client.submit(echo(text="x"))
        assert len(free.asked_admission) == asked


async def test_a_proxy_that_is_told_so_sends_refused_requests_on() -> None:
    """307 to the other set, which does not send them back, however full it is."""
    full, other = FakeFrontend([echo]), FakeFrontend([echo])
    options = ProxyOptions(redirects_refused=True)
    async with serve(build_app(full, options)) as here, serve(build_app(other, options)) as there:
        full.rejection = Overloaded("it is full", elsewhere=[f"http://127.0.0.1:{there}"])
        url = f"http://127.0.0.1:{here}/v1/requests?workflow=echo"
        body = {"inputs": {"text": "ahoy"}}
        async with httpx.AsyncClient(follow_redirects=True, trust_env=False) as http:
            answer = await http.post(url, json=body)
            assert answer.status_code == 202
            assert answer.json()["uid"] in other.requests_by_uid
            other.rejection = Overloaded("it is full, too", elsewhere=[f"http://127.0.0.1:{here}"])
            answer = await http.post(url, json=body)
            assert (answer.status_code, answer.json()["message"]) == (429, "it is full, too")
            answer = await http.post(f"{url}&redirect=0", json=body)
            assert (answer.status_code, answer.json()["message"]) == (429, "it is full")


async def test_a_full_set_refuses_what_would_wait(tmp_path: Path) -> None:
    """One worker: once it is known what it takes, one request runs, and no other gets in until it ended."""
    waiting_stages.reset()
    async with open_nodes(
        "tests.node.waiting_stages:nap",
        directory=tmp_path,
        workers=1,
        wait_factor=0.2,
        other_sets=("http://other:7080",),
    ) as nodes:
        proxy_ = proxy_of(nodes[0])

        async def submit(*, is_held: bool = False) -> str:
            inputs = {"seconds": 0.5, "is_held": is_held}
            return (await proxy_.submit("nap", inputs, timeout_seconds=60.0, key=None)).uid

        await ended(proxy_, await submit())
        running = await submit(is_held=True)
        with pytest.raises(Overloaded) as caught:
            await submit()
        assert caught.value.fields["reason"] == "wait"
        assert caught.value.fields["elsewhere"] == ["http://other:7080"]
        view = proxy_.admission()
        assert view["in_flight"] == 1
        assert view["counts"]["wait"] == 1
        assert view["workflows"]["nap"]["unloaded_seconds"] >= 0.5
        waiting_stages.may_step.release()
        await ended(proxy_, running)
        await ended(proxy_, await submit())
        assert proxy_.admission()["in_flight"] == 0


def test_options_of_the_door() -> None:
    """Weights and other sets are read from flags; what is unusable is named."""
    options = read_options(
        [
            "--weights",
            "workflow:film=2,tenant:gold=3.5",
            "--other-sets",
            "http://b:7080",
            "--wait-factor",
            "0.2",
        ],
        {},
    )
    weights = weights_of(options.weights)
    assert weights.of("film", "gold", 1) == (2.0, 3.5, 4.0)
    assert weights.of("stills", "", 0) == (1.0, 1.0, 1.0)
    assert (options.other_sets, options.wait_factor) == (("http://b:7080",), 0.2)
    for flags in (
        ["--weights", "film=2"],
        ["--weights", "tenant:gold=0"],
        ["--weights", "tenant:gold=nan"],
        ["--weights", "tenant:gold"],
        ["--other-sets", "b:7080"],
        ["--wait-factor", "-1"],
    ):
        with pytest.raises(ConfigError, match=flags[0]):
            read_options(flags, {})


async def test_proxies_share_one_set_and_a_dead_ones_share_is_the_others(tmp_path: Path) -> None:
    """What one proxy has seen the other knows; when it leaves, all of the set is the first one's again."""
    async with open_nodes("tests.node.waiting_stages:nap", directory=tmp_path, workers=1) as nodes:
        first = proxy_of(nodes[0])
        options = NodeOptions(roles=frozenset({"proxy"}), join=(Address.parse(nodes[0].address),))
        async with open_node(options, StopSignal()) as second_node:
            second = proxy_of(second_node)
            await until(lambda: second.readiness().ready and first.admission()["proxies"] == 2)
            inputs = {"seconds": 0.05, "is_held": False}
            accepted = await first.submit("nap", inputs, timeout_seconds=60.0, key=None)
            await ended(first, accepted.uid)
            await until(lambda: second.admission()["workflows"]["nap"]["unloaded_seconds"] is not None)
            assert second.admission()["counts"]["admitted"] == 0
            await until(lambda: second.admission()["share"] < 1 and first.admission()["share"] < 1)
            second_node.member.farewell()
            await until(lambda: first.admission()["proxies"] == 1)
            assert first.admission()["share"] == 1.0
