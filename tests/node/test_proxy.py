"""The proxy's paths, without a socket, with a frontend that the test drives."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from attrs import define, evolve

from onepiece import StageContext, Tensor, stage, workflow
from onepiece.codec import VALUE_CONTENT_TYPE, pack, value_from_bytes
from onepiece.errors import NotReady, Overloaded, StageFailed
from onepiece.node.frontend import NodeView, Readiness
from onepiece.node.http_testing import FakeFrontend
from onepiece.node.proxy import ProxyOptions, build_app
from onepiece.requests import EventKind, RequestState

UNKNOWN_UID = "0" * 26


@stage
async def render(
    ctx: StageContext[None],
    prompt: str,
    image: bytes,
    steps: int,
    scale: float,
    tags: list[str],
    latents: Tensor | None,
) -> bytes:
    """Never runs here."""
    return image


@workflow
def movie(
    prompt: str,
    image: bytes = b"",
    steps: int = 4,
    scale: float = 1.0,
    tags: list[str] = [],  # noqa: B006 - a workflow's defaults are constants of its graph
    latents: Tensor | None = None,
) -> bytes:
    """One stage with inputs of every sort."""
    return render(prompt, image, steps, scale, tags, latents)


@define
class Proxy:
    """A proxy's frontend, and a plain HTTP client that calls its application."""

    frontend: FakeFrontend
    http: httpx.AsyncClient

    async def submit(self, **inputs: Any) -> str:
        """Submit as JSON; the UID."""
        answer = await self.http.post("/v1/requests", json={"workflow": "movie", "inputs": inputs})
        assert answer.status_code == 202, answer.text
        uid: str = answer.json()["uid"]
        return uid

    def inputs(self, answer: httpx.Response) -> Any:
        """What reached the frontend."""
        assert answer.status_code == 202, answer.text
        return self.frontend.requests_by_uid[answer.json()["uid"]].inputs


@asynccontextmanager
async def proxy(options: ProxyOptions | None = None) -> AsyncIterator[Proxy]:
    """A proxy's application."""
    frontend = FakeFrontend([movie])
    transport = httpx.ASGITransport(build_app(frontend, options))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as http:
        yield Proxy(frontend, http)


def refusal(answer: httpx.Response, status: int, error: str, *words: str) -> dict[str, Any]:
    """The error in an answer, which must be this one and say these words."""
    wire: dict[str, Any] = answer.json()
    assert (answer.status_code, wire["error"]) == (status, error), answer.text
    for word in words:
        assert word in wire["message"], wire["message"]
    return wire


async def test_a_request_is_submitted_as_json() -> None:
    """JSON inputs reach the node as the signature's types, with defaults; the answer is the status."""
    async with proxy() as served:
        answer = await served.http.post(
            "/v1/requests",
            json={
                "workflow": "movie",
                "inputs": {"prompt": "a ship", "image": {"$base64": "AAEC"}, "scale": 2, "tags": ["x"]},
                "timeout_seconds": 30,
                "key": "order-17",
            },
        )
        assert served.inputs(answer) == {
            "prompt": "a ship",
            "image": b"\0\1\2",
            "steps": 4,
            "scale": 2.0,
            "tags": ["x"],
            "latents": None,
        }
        status = answer.json()
        assert (status["workflow"], status["state"], status["key"]) == ("movie", "accepted", "order-17")
        assert status["deadline_at"] - status["accepted_at"] == pytest.approx(30)
        assert answer.headers["Location"] == f"/v1/requests/{status['uid']}"


async def test_a_request_is_submitted_as_a_form() -> None:
    """Files are bytes, texts are read as the signature says, and the JSON field says the rest."""
    async with proxy() as served:
        answer = await served.http.post(
            "/v1/requests",
            data={
                "request": json.dumps({"workflow": "movie", "inputs": {"scale": 0.5}}),
                "prompt": "a ship",
                "steps": "7",
                "tags": '["x"]',
            },
            files={"image": ("ship.png", b"\x89PNG\r\n--not-the-boundary\r\n", "image/png")},
        )
        assert served.inputs(answer) == {
            "prompt": "a ship",
            "image": b"\x89PNG\r\n--not-the-boundary\r\n",
            "steps": 7,
            "scale": 0.5,
            "tags": ["x"],
            "latents": None,
        }


async def test_a_form_needs_no_json_if_the_url_names_the_workflow() -> None:
    """``curl -F`` alone can submit."""
    async with proxy() as served:
        answer = await served.http.post(
            "/v1/requests?workflow=movie&timeout_seconds=5",
            files={"prompt": (None, "a ship"), "image": ("i", b"x")},
            headers={"Idempotency-Key": "k"},
        )
        assert served.inputs(answer)["image"] == b"x"
        assert answer.json()["key"] == "k"


async def test_a_request_is_submitted_packed_with_tensors() -> None:
    """Our own form carries what JSON cannot; an input of the wrong type is named all the same."""
    numpy = pytest.importorskip("numpy")
    async with proxy() as served:
        latents = numpy.arange(6, dtype="float32").reshape(2, 3)
        body = b"".join(pack(None, {"prompt": "p", "latents": latents}).parts)
        headers = {"Content-Type": VALUE_CONTENT_TYPE}
        answer = await served.http.post("/v1/requests?workflow=movie", content=body, headers=headers)
        got = served.inputs(answer)["latents"]
        assert [float(each) for each in got.flatten()] == [0, 1, 2, 3, 4, 5]

        for inputs, field in (({"prompt": latents}, "prompt"), ({"prompt": "p", "nonsense": 1}, "nonsense")):
            body = b"".join(pack(None, inputs).parts)
            answer = await served.http.post("/v1/requests?workflow=movie", content=body, headers=headers)
            assert refusal(answer, 422, "InvalidInput", field)["fields"]["field"] == field
        answer = await served.http.post("/v1/requests?workflow=movie", content=b"OPV1xx", headers=headers)
        refusal(answer, 422, "InvalidInput", VALUE_CONTENT_TYPE)


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"inputs": {}}, "workflow", ["missing", "movie"]),
        ({"workflow": 3}, "workflow", ["int"]),
        ({"workflow": "movie", "inputs": []}, "inputs", ["list", "object"]),
        ({"workflow": "movie", "inputs": {}}, "prompt", ["needs", "prompt"]),
        ({"workflow": "movie", "inputs": {"prompt": "p", "stpes": 3}}, "stpes", ["no input", "steps"]),
        ({"workflow": "movie", "inputs": {"prompt": 3}}, "prompt", ["str", "3"]),
        ({"workflow": "movie", "inputs": {"prompt": "p", "steps": "4"}}, "steps", ["int"]),
        ({"workflow": "movie", "inputs": {"prompt": "p", "steps": True}}, "steps", ["int"]),
        ({"workflow": "movie", "inputs": {"prompt": "p", "image": "text"}}, "image", ["$base64", "form"]),
        ({"workflow": "movie", "inputs": {"prompt": "p", "image": {"$base64": "?"}}}, "image", ["base64"]),
        ({"workflow": "movie", "inputs": {"prompt": "p"}, "timeout": 3}, "timeout", ["timeout_seconds"]),
        ({"workflow": "movie", "inputs": {"prompt": "p"}, "timeout_seconds": -1}, "timeout_seconds", ["-1"]),
        ({"workflow": "movie", "inputs": {"prompt": "p"}, "timeout_seconds": True}, "timeout_seconds", []),
        ({"workflow": "movie", "inputs": {"prompt": "p"}, "timeout_seconds": 1e30}, "timeout_seconds", []),
        ({"workflow": "movie", "inputs": {"prompt": "p"}, "key": ""}, "key", []),
        ({"workflow": "movie", "inputs": {"prompt": "p"}, "key": "x" * 300}, "key", ["256"]),
    ],
)
async def test_bad_input_names_the_field_and_the_next_request_works(
    body: dict[str, Any], field: str, words: list[str]
) -> None:
    """An unknown, missing or wrong field is named; nothing of the request is kept."""
    async with proxy() as served:
        answer = await served.http.post("/v1/requests", json=body)
        wire = refusal(answer, 422, "InvalidInput", *words)
        assert wire["fields"]["field"] == field
        assert not served.frontend.requests_by_uid
        await served.submit(prompt="fine")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"{", "no JSON"),
        (b"", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[1]", "object"),
        (b'{"workflow": "movie", "workflow": "movie"}', "twice"),
        (b'{"inputs": {"prompt": NaN}}', "NaN"),
        (b"[" * 100_000, "nested"),
    ],
)
async def test_what_is_no_json_is_refused(body: bytes, word: str) -> None:
    """Malformed JSON of every kind is the client's error, never ours."""
    async with proxy() as served:
        headers = {"Content-Type": "application/json"}
        refusal(
            await served.http.post("/v1/requests", content=body, headers=headers), 422, "InvalidInput", word
        )
        await served.submit(prompt="fine")


async def test_a_prompt_of_a_megabyte_is_refused_by_its_bound() -> None:
    """A text beyond its bound is refused by name, in every form of body."""
    async with proxy() as served:
        prompt = "x" * (1 << 20)
        answer = await served.http.post(
            "/v1/requests", json={"workflow": "movie", "inputs": {"prompt": prompt}}
        )
        assert refusal(answer, 413, "PayloadTooLarge", "65536")["fields"]["field"] == "prompt"
        answer = await served.http.post("/v1/requests?workflow=movie", files={"prompt": (None, prompt)})
        assert refusal(answer, 413, "PayloadTooLarge", "65536")["fields"]["field"] == "prompt"


async def test_an_unknown_workflow_is_refused_with_those_that_are_known() -> None:
    """The known ones are listed, whether the name is in the URL or in the body."""
    async with proxy() as served:
        for answer in (
            await served.http.post("/v1/requests", json={"workflow": "opera", "inputs": {}}),
            await served.http.post("/v1/requests?workflow=opera", json={}),
            await served.http.post("/v1/requests", files={"request": (None, '{"workflow": "opera"}')}),
        ):
            refusal(answer, 404, "UnknownWorkflow", "opera", "movie")


@pytest.mark.parametrize(
    ("content_type", "body", "word"),
    [
        ("text/plain", b"x", "application/json"),
        ("multipart/form-data", b"x", "boundary"),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\nx", "name"),
        ("multipart/form-data; boundary=b", b"nonsense", "damaged"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx',
            "cut short",
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx\r\n' * 2 + b"--b--\r\n",
            "twice",
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n\xff\r\n--b--\r\n',
            "UTF-8",
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="steps"\r\n\r\nmany\r\n--b--\r\n',
            "many",
        ),
    ],
)
async def test_a_body_of_no_known_form_is_refused(content_type: str, body: bytes, word: str) -> None:
    """Each way in which a form can be broken has its own words."""
    async with proxy() as served:
        answer = await served.http.post(
            "/v1/requests?workflow=movie", content=body, headers={"Content-Type": content_type}
        )
        refusal(answer, 422, "InvalidInput", word)
        await served.submit(prompt="fine")


async def test_what_is_said_twice_must_not_differ() -> None:
    """URL, header and body may repeat each other, and not contradict."""
    async with proxy() as served:
        body = {"workflow": "movie", "inputs": {"prompt": "p"}, "key": "a"}
        headers = {"Idempotency-Key": "b"}
        answer = await served.http.post("/v1/requests", json=body, headers=headers)
        assert refusal(answer, 422, "InvalidInput", "'a'", "'b'")["fields"]["field"] == "key"
        answer = await served.http.post("/v1/requests?workflow=movie", json=body | {"workflow": "opera"})
        refusal(answer, 422, "InvalidInput", "opera")
        answer = await served.http.post("/v1/requests?colour=red", json=body)
        refusal(answer, 422, "InvalidInput", "colour")


async def test_the_same_key_gives_the_same_request() -> None:
    """A client whose reply got lost sends again and gets the first request's UID."""
    async with proxy() as served:
        body = {"workflow": "movie", "inputs": {"prompt": "p"}}
        headers = {"Idempotency-Key": "order-17"}
        uids = {
            (await served.http.post("/v1/requests", json=body, headers=headers)).json()["uid"]
            for _ in range(3)
        }
        assert len(uids) == 1
        assert len(served.frontend.requests_by_uid) == 1


async def test_rejections_say_when_to_come_again() -> None:
    """429 and 503 carry ``Retry-After``, rounded up, and the error says that trying again makes sense."""
    async with proxy() as served:
        for error, status, seconds in (
            (Overloaded("17 in flight", retry_after_seconds=2.3), 429, "3"),
            (NotReady("denoise is loading"), 503, "1"),
        ):
            served.frontend.rejection = error
            answer = await served.http.post("/v1/requests?workflow=movie", json={"inputs": {"prompt": "p"}})
            wire = refusal(answer, status, type(error).__name__)
            assert answer.headers["Retry-After"] == seconds
            assert wire["retryable"]


async def test_status_list_and_cancel() -> None:
    """Requests are listed newest first and by state; cancelling is idempotent."""
    async with proxy() as served:
        first, second = await served.submit(prompt="1"), await served.submit(prompt="2")
        listed = (await served.http.get("/v1/requests")).json()["requests"]
        assert [each["uid"] for each in listed] == [second, first]
        for _ in range(2):
            cancelled = (await served.http.delete(f"/v1/requests/{first}")).json()
            assert cancelled["state"] == "cancelled"
            assert cancelled["error"]["error"] == "RequestCancelled"
        listed = (await served.http.get("/v1/requests?state=cancelled&limit=5")).json()["requests"]
        assert [each["uid"] for each in listed] == [first]
        assert (await served.http.get(f"/v1/requests/{second}")).json()["state"] == "accepted"


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "limit=9999999999999", "state=lost", "page=2"]
)
async def test_a_list_has_bounds(query: str) -> None:
    """What cannot be listed is refused, naming the parameter."""
    async with proxy() as served:
        answer = await served.http.get(f"/v1/requests?{query}")
        refusal(answer, 422, "InvalidInput", query.partition("=")[0])


@pytest.mark.parametrize("uid", [UNKNOWN_UID, "..", "x" * 200, "%00"])
async def test_an_unknown_uid_is_not_found(uid: str) -> None:
    """On every path of a request; a text that is no UID does not even reach the node."""
    async with proxy() as served:
        for method, rest in (
            ("GET", ""),
            ("DELETE", ""),
            ("GET", "/events"),
            ("GET", "/result"),
            ("DELETE", "/result"),
        ):
            answer = await served.http.request(method, f"/v1/requests/{uid}{rest}")
            assert answer.status_code == 404, answer.text
            assert answer.json()["error"] in {"UnknownRequest", "OnePieceError"}


async def test_unknown_paths_and_methods_are_json_errors() -> None:
    """The router's refusals have the form of all others."""
    async with proxy() as served:
        refusal(await served.http.get("/v2/requests"), 404, "OnePieceError", "/v2/requests")
        refusal(await served.http.put("/v1/requests"), 405, "OnePieceError", "PUT")


async def test_workflows_are_described() -> None:
    """A client learns names, types, which inputs it must give, and the defaults."""
    async with proxy() as served:
        (described,) = (await served.http.get("/v1/workflows")).json()["workflows"]
        assert described["name"] == "movie"
        assert described["returns"] == "bytes"
        inputs = {each["name"]: each for each in described["inputs"]}
        assert inputs["prompt"]["required"]
        assert (inputs["steps"]["type"], inputs["steps"]["default"]) == ("int", 4)
        assert inputs["image"]["default"] == {"$base64": ""}
        assert inputs["latents"]["kinds"] == ["tensor", "none"]
        assert "render" in described["stages"]


@pytest.mark.parametrize(
    "tags", [["t" * 900] * 400, ["t" * 2000] * 1100], ids=["more than a header holds", "too many long texts"]
)
async def test_inputs_that_no_message_holds_are_refused_by_name(tags: list[str]) -> None:
    """Each fits the bounds of its type; together they have no form on the wire, which is no fault of ours."""
    async with proxy() as served:
        wire = {"workflow": "movie", "inputs": {"prompt": "p", "tags": tags}}
        refused = refusal(await served.http.post("/v1/requests", json=wire), 422, "InvalidInput", "'tags'")
        assert refused["fields"]["field"] == "tags"


async def test_nodes_are_listed() -> None:
    """Each node's view is given as it is."""
    async with proxy() as served:
        served.frontend.node_views = [
            NodeView("n1", 3, "tcp://h:1", None, ["worker"], "alive", ["cpu:0"], [{"stage": "s"}], 42, 0.5)
        ]
        (node,) = (await served.http.get("/v1/nodes")).json()["nodes"]
        assert (node["node"], node["incarnation"], node["actors"]) == ("n1", 3, [{"stage": "s"}])


async def test_health_and_readiness_differ() -> None:
    """A node that loads its models is alive and not ready, and says what it waits for (fault 113)."""
    async with proxy() as served:
        assert (await served.http.get("/readyz")).status_code == 200
        served.frontend.readiness_now = Readiness(
            ready=False, live=True, draining=False, waiting_for=["movie/render is loading on n2"]
        )
        assert (await served.http.get("/healthz")).status_code == 200
        answer = await served.http.get("/readyz")
        refusal(answer, 503, "NotReady", "movie/render is loading on n2")
        assert answer.headers["Retry-After"] == "1"
        served.frontend.readiness_now = evolve(served.frontend.readiness_now, ready=True, draining=True)
        refusal(await served.http.get("/readyz"), 503, "NotReady")
        served.frontend.readiness_now = evolve(served.frontend.readiness_now, live=False)
        assert (await served.http.get("/healthz")).status_code == 503


async def test_a_bug_is_told_without_its_insides(capsys: pytest.CaptureFixture[str]) -> None:
    """An exception of ours is a 500 with a number that the log has, too; the next request works."""
    async with proxy() as served:
        uid = await served.submit(prompt="p")
        served.frontend.fail_with = RuntimeError("the secret inside")
        answer = await served.http.get(f"/v1/requests/{uid}")
        wire = refusal(answer, 500, "OnePieceError", wire_number := "number=")
        assert "secret" not in answer.text
        assert "Traceback" not in answer.text
        logged = capsys.readouterr()
        assert wire["fields"]["number"] in logged.out + logged.err
        assert "the secret inside" in logged.out + logged.err
        assert wire_number in wire["message"]
        served.frontend.fail_with = None
        assert (await served.http.get(f"/v1/requests/{uid}")).status_code == 200


async def test_a_failed_request_tells_its_error_at_every_path() -> None:
    """Status, result and events all name the stage that failed."""
    async with proxy() as served:
        uid = await served.submit(prompt="p")
        served.frontend.fail(uid, StageFailed("denoise raised ValueError", stage="denoise"))
        status = (await served.http.get(f"/v1/requests/{uid}")).json()
        assert status["state"] == RequestState.FAILED.value
        assert status["error"]["fields"] == {"stage": "denoise"}
        refusal(await served.http.get(f"/v1/requests/{uid}/result"), 500, "StageFailed", "denoise raised")
        events = (await served.http.get(f"/v1/requests/{uid}/events")).text
        assert "denoise raised" in events
        assert EventKind.FAILED.value in events


async def test_the_result_is_negotiated() -> None:
    """Bytes come bare and plain values as JSON, unless the client takes our own form."""
    async with proxy() as served:
        cases: list[tuple[Any, str | None, str, Any]] = [
            (b"\0\1", None, "application/octet-stream", b"\0\1"),
            (b"\0\1", VALUE_CONTENT_TYPE, VALUE_CONTENT_TYPE, b"\0\1"),
            (b"\0\1", "application/json", "application/json", {"$base64": "AAE="}),
            ({"a": [1, "x"]}, None, "application/json", {"a": [1, "x"]}),
            ("text", "*/*", "application/json", "text"),
            ("text", f"{VALUE_CONTENT_TYPE}, */*", VALUE_CONTENT_TYPE, "text"),
        ]
        for value, accept, content_type, expected in cases:
            uid = await served.submit(prompt="p")
            served.frontend.finish(uid, value)
            headers = {} if accept is None else {"Accept": accept}
            answer = await served.http.get(f"/v1/requests/{uid}/result", headers=headers)
            assert answer.headers["Content-Type"].partition(";")[0] == content_type
            if content_type == VALUE_CONTENT_TYPE:
                assert value_from_bytes(answer.content) == expected
            elif content_type == "application/json":
                assert answer.json() == expected
            else:
                assert answer.content == expected


async def test_a_result_that_fits_no_accepted_form_is_refused_and_stays() -> None:
    """A tensor is no JSON: 406 says which form there is, and the result can still be fetched."""
    numpy = pytest.importorskip("numpy")
    async with proxy() as served:
        uid = await served.submit(prompt="p")
        served.frontend.finish(uid, numpy.zeros(3, dtype="float32"))
        path = f"/v1/requests/{uid}/result"
        answer = await served.http.get(path, headers={"Accept": "application/json"})
        refusal(answer, 406, "OnePieceError", VALUE_CONTENT_TYPE)
        answer = await served.http.get(path)
        assert answer.headers["Content-Type"] == VALUE_CONTENT_TYPE
        assert value_from_bytes(answer.content).shape == (3,)
