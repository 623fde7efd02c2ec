"""A narrow set with two proxies: overload, large bodies, late stages, and tensors of every kind."""

import json
import socket
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

import httpx
import pytest

from stages.synthetic import expected_digest
from tests.acceptance.http_api import Api, as_json
from tests.acceptance.node_set import DEVICE, NodeSet, eventually, open_set
from tests.acceptance.own_stages import odd_tensors

MEBIBYTE: Final = 1 << 20
IN_FLIGHT_MAX: Final = 2
WORKFLOWS: Final = (
    "stages.synthetic:chain",
    *(f"tests.acceptance.own_stages:{name}" for name in ("overdue", "tensors", "weight", "plain")),
)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeSet]:
    """A seed whose proxy takes two requests at once and bodies of 4 MiB, and a worker with a proxy."""
    named = [part for workflow in WORKFLOWS for part in ("--workflow", workflow)]
    limits = ("--requests-max", str(IN_FLIGHT_MAX), "--body-bytes-max", "4MiB")
    with open_set(tmp_path_factory.mktemp("narrow") / "set") as a_set:
        seed = a_set.start("--roles", "proxy,manager,store", *limits, *named)
        joining = ("--roles", "worker,proxy", "--join", seed.address, "--devices", DEVICE)
        worker = a_set.start(*joining)
        a_set.wait_ready()
        a_set.wait_ready(worker)
        yield a_set


def in_flight(api: Api) -> list[str]:
    """UIDs of the requests that have not ended."""
    listed = api.client.get("/v1/requests").json()["requests"]
    return [request["uid"] for request in listed if request["finished_at"] is None]


@pytest.fixture(autouse=True)
def api(narrow: NodeSet) -> Api:
    """The seed's proxy, with nothing in flight."""
    api = narrow.api()
    for uid in in_flight(api):
        api.cancel(uid)
    eventually(lambda: not in_flight(api), "nothing is in flight")
    return api


@pytest.fixture
def full(api: Api) -> Iterator[Api]:
    """The seed's proxy with as many requests in flight as it takes."""
    uids = [api.submit("chain", {"seconds": 60.0, "steps": 6000}) for _ in range(IN_FLIGHT_MAX)]
    yield api
    for uid in uids:
        api.cancel(uid)


def answer_to_head(api: Api, path: str, *headers: str) -> tuple[int, dict[str, object]]:
    """Send the head of a request and not one byte of its body; the status and JSON of the answer."""
    place = urlsplit(api.url)
    assert place.hostname is not None
    head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: test", *headers, "", ""])
    with socket.create_connection((place.hostname, place.port or 0), timeout=20) as connection:
        connection.sendall(head.encode())
        received = bytearray()
        while b"\r\n\r\n" not in received:
            received += connection.recv(65536)
        text, _, body = received.partition(b"\r\n\r\n")
        length = next(
            int(line.partition(b":")[2])
            for line in text.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        )
        while len(body) < length:
            body += connection.recv(65536)
    return int(text.split()[1]), json.loads(body)


# --- overload ----------------------------------------------------------------------------------


def test_request_beyond_the_budget_is_rejected(full: Api) -> None:
    """It gets 429 and a time to come again; once there is room, requests are taken again."""
    refused = full.post("plain", {"text": "one more"})
    assert refused.status_code == 429
    assert refused.json()["error"] == "Overloaded"
    assert int(refused.headers["Retry-After"]) >= 1
    running = in_flight(full)
    assert len(running) == IN_FLIGHT_MAX
    full.cancel(running[0])
    assert full.post("plain", {"text": "room"}).status_code == 202


def test_large_body_during_overload_is_rejected_unread(full: Api) -> None:
    """An overloaded proxy answers before the first byte of a large body has come (fault 83)."""
    status, error = answer_to_head(
        full,
        "/v1/requests?workflow=weight",
        "Content-Type: multipart/form-data; boundary=x",
        "Content-Length: 3000000",
    )
    assert status == 429
    assert error["error"] == "Overloaded"


def test_body_beyond_the_bound_is_rejected_unread(api: Api) -> None:
    """A body that is larger than the bound is refused by its Content-Length, with the bound named."""
    status, error = answer_to_head(
        api,
        "/v1/requests",
        "Content-Type: multipart/form-data; boundary=x",
        "Content-Length: 50000000",
    )
    assert status == 413
    assert error["error"] == "PayloadTooLarge"
    assert str(4 * MEBIBYTE) in str(error["message"])


def test_body_that_says_no_length_is_cut_off(api: Api) -> None:
    """A body of unknown length is read up to the bound, and the client gets to read why no further."""

    def pieces() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
        for _ in range(6):
            yield bytes(MEBIBYTE)

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    path = "/v1/requests?workflow=weight"
    refused = api.client.post(path, content=pieces(), headers=headers)
    assert refused.status_code == 413
    assert api.run("plain", {"text": "next"}).startswith("next@")


def test_file_and_text_as_a_form(api: Api) -> None:
    """An input of megabytes goes as a file of a form, and arrives whole."""
    form = {"request": (None, json.dumps({"workflow": "weight", "inputs": {"prompt": "a ship"}}))}
    image = {"image": ("still.png", bytes(3 * MEBIBYTE))}
    accepted = api.client.post("/v1/requests", files={**form, **image})
    assert accepted.status_code == 202, accepted.text
    assert api.result(accepted.json()["uid"]) == 3 * MEBIBYTE + len("a ship")


def test_input_larger_than_an_inbox_is_pulled(narrow: NodeSet) -> None:
    """What an inbox's ring cannot hold comes to its stage all the same."""
    with open_set(narrow.directory / "small") as a_set:
        inbox = ("--devices", DEVICE, "--inbox-bytes", "1MiB")
        a_set.start(*inbox, "--workflow", "tests.acceptance.own_stages:weight")
        a_set.wait_ready()
        api = a_set.api()
        assert api.run("weight", {"image": as_json(bytes(3 * MEBIBYTE))}) == 3 * MEBIBYTE
        assert api.run("weight", {"image": as_json(bytes(1000))}) == 1000


# --- stages that are late ----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["wait", "report", "block"])
def test_stage_past_its_timeout(api: Api, how: str) -> None:
    """Its request fails, however the stage hangs, and the next request runs on the same device."""
    error = api.failed(api.submit("overdue", {"how": how}))
    assert error["error"] == "StageFailed"
    assert "timeout of 0.3 s" in error["message"]
    assert api.run("overdue", {"how": "at once"}) == "at once"


def test_deadline_of_a_stage_that_blocks(api: Api) -> None:
    """A request ends at its deadline even if its stage never looks up."""
    uid = api.submit("chain", {"seconds": [1.5, 0.0, 0.0]}, timeout_seconds=0.3)
    assert api.failed(uid)["error"] == "DeadlineExceeded"
    assert api.run("chain").digest == expected_digest("chain")


def test_deadline_of_a_request_that_waits(api: Api) -> None:
    """A request that waits behind another one ends at its deadline without having run."""
    running = api.submit("chain", {"seconds": 60.0, "steps": 6000})
    eventually(lambda: api.status(running)["stages"]["first"] == "running", "the first one runs")
    waiting = api.submit("chain", timeout_seconds=0.3)
    assert api.failed(waiting)["error"] == "DeadlineExceeded"
    assert "stage_started" not in [event["kind"] for event in api.events(waiting)]
    api.cancel(running)


# --- tensors -----------------------------------------------------------------------------------


@pytest.mark.diffusion
def test_tensors_arrive_as_they_were_sent(api: Api) -> None:
    """Every dtype, shape and stride comes bit-equal from stage to stage (faults 71, 72)."""
    found = api.run("tensors", timeout_seconds=50)
    assert found == dict.fromkeys(odd_tensors(), "equal")


@pytest.mark.diffusion
def test_tensors_are_not_larger_than_their_elements(api: Api) -> None:
    """A small view of much memory, and a broadcast row, cost what their elements cost (faults 71, 72)."""
    uid = api.submit("tensors", timeout_seconds=50)
    elements = sum(tensor.numel() * tensor.element_size() for tensor in odd_tensors().values())
    finished = {e["stage"]: e["detail"] for e in api.events(uid) if e["kind"] == "stage_finished"}
    received = finished["check_tensors"]["received_bytes"]
    head_and_alignment = 4096
    assert elements <= received <= elements + head_and_alignment


# --- two proxies -------------------------------------------------------------------------------


@pytest.mark.parametrize("taker_is_seed", [True, False], ids=["seed takes", "worker takes"])
def test_result_through_the_other_proxy(narrow: NodeSet, taker_is_seed: bool) -> None:
    """A result is served by whichever proxy is asked, right after it was announced (fault 115)."""
    [worker] = narrow.workers
    proxies = (narrow.api(), narrow.api(worker))
    taker, asker = proxies if taker_is_seed else reversed(proxies)
    uid = taker.submit("plain", {"text": "ahoy"})
    taker.ended(uid)
    answer = asker.client.get(f"/v1/requests/{uid}/result", headers={"Accept": "application/json"})
    assert answer.status_code == 200, answer.text
    assert answer.json().startswith("ahoy@")
    kept = f"/v1/requests/{uid}/result?keep=1"
    eventually(lambda: taker.client.get(kept).status_code != 200, "it is dropped once fetched")
    assert taker.client.get(kept).status_code == 410


def test_a_uid_that_is_unknown_to_all(narrow: NodeSet) -> None:
    """A UID that nobody has heard of is unknown to both, whatever is asked about it.

    A proxy says so once it has been up for long enough to know that no store node is missing.
    """
    [worker] = narrow.workers
    uid = narrow.api().submit("plain", {"text": "ahoy"})
    unknown = uid[:-4] + "0000"
    for api in (narrow.api(), narrow.api(worker)):
        for path in ("", "/result", "/events"):
            answer = sure_answer(api, f"/v1/requests/{unknown}{path}")
            assert answer.status_code == 404, path
            assert answer.json()["error"] == "UnknownRequest"


def sure_answer(api: Api, path: str) -> httpx.Response:
    """What a proxy answers as soon as that is not that it cannot know yet."""

    def look() -> httpx.Response | None:
        answer = api.client.get(path)
        return None if answer.status_code == 503 else answer

    return eventually(look, f"a sure answer to {path}")


def test_both_proxies_see_the_same_set(narrow: NodeSet) -> None:
    """Nodes, workflows and readiness are the same through each of them."""
    [worker] = narrow.workers
    one, other = narrow.api(), narrow.api(worker)
    assert one.nodes().keys() == other.nodes().keys() == {narrow.seed.node_id, worker.node_id}
    assert one.client.get("/v1/workflows").json() == other.client.get("/v1/workflows").json()
    assert one.readiness() == other.readiness()
