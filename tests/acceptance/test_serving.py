"""Five node processes serve several workflows: results, events, failures, bad input."""

import concurrent.futures
import itertools
from typing import Any

import pytest

from stages.synthetic import CHAIN_STAGES, DIAMOND_STAGES, expected_digest
from tests.acceptance.http_api import Api, as_json
from tests.acceptance.node_set import NodeSet


@pytest.fixture
def api(five: NodeSet) -> Api:
    """The seed's proxy."""
    return five.api()


@pytest.mark.parametrize("size", [0, 1, 100_000, 3_000_000])
def test_diamond_returns_what_its_stages_computed(api: Api, size: int) -> None:
    """A workflow with a fork and a join gives the digest over every byte its stages sent."""
    outcome = api.run("diamond", {"payload_bytes": size, "seed": size})
    assert outcome.digest == expected_digest("diamond", size, seed=size)


def test_chain_with_a_size_for_each_stage(api: Api) -> None:
    """Three stages pass on payloads of their own sizes."""
    sizes = [5, 70_000, 0]
    outcome = api.run("chain", {"payload_bytes": sizes, "seed": 3})
    assert outcome.digest == expected_digest("chain", sizes, seed=3)


def test_one_stage_three_times_on_one_actor(five: NodeSet, api: Api) -> None:
    """A stage sends to itself, twice over, and the request ends with its bytes (fault 13)."""
    relays = [actor for node in api.nodes().values() for actor in node["actors"] if "relay" in actor["stage"]]
    assert len(relays) == 1
    assert api.run("noop", {"payload": as_json(b"ahoy" * 1000)}) == b"ahoy" * 1000


def test_the_same_workflow_again_and_again(api: Api) -> None:
    """Nothing of an earlier request is left in the next one in the same processes (fault 41)."""
    for seed in (1, 2, 1):
        outcome = api.run("diamond", {"payload_bytes": 1000, "seed": seed})
        assert outcome.digest == expected_digest("diamond", 1000, seed=seed)


def test_many_requests_at_once_keep_apart(five: NodeSet) -> None:
    """Requests that run at the same time get each its own result, whatever they share."""

    def one(seed: int) -> tuple[str, str]:
        name: Any = "diamond" if seed % 2 else "chain"
        with Api(five.seed.http) as own:
            outcome = own.run(name, {"payload_bytes": 10_000 + seed, "seed": seed})
        return outcome.digest, expected_digest(name, 10_000 + seed, seed)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        pairs = list(threads.map(one, range(40)))
    assert [got for got, _ in pairs] == [wanted for _, wanted in pairs]


def test_two_workflows_share_a_stage(api: Api) -> None:
    """A stage of two workflows runs in one actor that serves both."""
    plain, loud = api.run("plain", {"text": "ahoy"}), api.run("loud", {"text": "ahoy"})
    assert plain.startswith("ahoy@")
    assert loud == plain.upper()


def test_stage_that_wants_a_gpu_runs_where_there_is_none(api: Api) -> None:
    """On machines without any GPU such a stage runs on a processor and is told so."""
    assert api.run("wants_gpu", {"text": "ahoy"}) == "ahoy on cpu"


def test_stages_spread_over_the_workers(five: NodeSet, api: Api) -> None:
    """Every worker has actors, the seed has none, and all are ready."""
    nodes = api.nodes()
    assert len(nodes) == 5
    assert nodes[five.seed.node_id]["actors"] == []
    for worker in five.workers:
        actors = nodes[worker.node_id]["actors"]
        assert actors
        assert {actor["state"] for actor in actors} == {"ready"}
        assert nodes[worker.node_id]["process_id"] == worker.pid


def test_result_larger_than_a_message_by_range(api: Api) -> None:
    """A result of many pieces is read whole, and in part, as it was stored."""
    uid = api.submit("many_bytes", {"mebibytes": 5})
    whole = api.result(uid)
    assert len(whole) == 5 << 20
    part = api.client.get(f"/v1/requests/{uid}/result", headers={"Range": "bytes=1048570-1048585"})
    assert part.status_code == 206
    assert part.content == whole[1048570:1048586]


def test_fetched_result_is_gone_afterwards(api: Api) -> None:
    """Fetching a result purges it; who asks again is told that it was there."""
    uid = api.submit("plain", {"text": "once"})
    api.ended(uid)
    assert api.client.get(f"/v1/requests/{uid}/result").status_code == 200
    again = api.client.get(f"/v1/requests/{uid}/result")
    assert again.status_code == 410, again.text
    assert again.json()["error"] == "ResultGone"


# --- events ------------------------------------------------------------------------------------


def test_events_tell_a_request_in_order(api: Api) -> None:
    """Sequences grow; each stage is queued, starts, reports its steps and finishes; the end comes last.

    A stage that ends at once may end its request before its steps are told.
    """
    uid = api.submit("chain", {"steps": 3, "seconds": 0.6})
    events = list(api.events(uid))
    sequences = [event["sequence"] for event in events]
    assert sequences == sorted(set(sequences))
    assert events[0]["kind"] == "accepted"
    assert events[-1]["kind"] == "finished"
    for name in CHAIN_STAGES:
        kinds = [event["kind"] for event in events if event["stage"] == name]
        assert kinds[:2] == ["queued", "stage_started"], kinds
        assert kinds[-1] == "stage_finished", kinds
        steps = [e["detail"]["step"] for e in events if e["stage"] == name and e["kind"] == "progress"]
        assert steps, f"{name} told no step"
        assert steps == sorted(set(steps)), steps
        assert set(steps) <= {1, 2, 3}


def test_events_resume_behind_the_last_one_seen(api: Api) -> None:
    """A client that comes back with Last-Event-ID gets what followed, once each."""
    uid = api.submit("chain", {"seconds": 0.05, "steps": 2})
    first = list(itertools.islice(api.events(uid), 3))
    rest = list(api.events(uid, after=first[-1]["sequence"]))
    assert rest[0]["sequence"] > first[-1]["sequence"]
    assert rest[-1]["kind"] == "finished"
    assert list(api.events(uid, after=rest[-1]["sequence"])) == []


def test_finished_stage_tells_its_costs(api: Api) -> None:
    """Every finished stage says where it ran, how long it waited, computed, and what it moved."""
    uid = api.submit("diamond", {"seconds": 0.02, "payload_bytes": 50_000})
    finished = {e["stage"]: e for e in api.events(uid) if e["kind"] == "stage_finished"}
    assert finished.keys() == set(DIAMOND_STAGES)
    for name, event in finished.items():
        detail = event["detail"]
        assert detail["compute_seconds"] >= 0.02, name
        assert min(detail["waited_seconds"], detail["transfer_seconds"], detail["received_bytes"]) >= 0
        assert detail["device"] == "cpu:0"
    assert finished["merge"]["detail"]["received_bytes"] >= 100_000


# --- failures of stages ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("exit", "SystemExit"),
        ("interrupt", "KeyboardInterrupt"),
        ("memory", "MemoryError"),
        ("exit in a thread", "SystemExit"),
    ],
)
def test_stage_that_ends_badly_is_loaded_anew(api: Api, fault: str, cause: str) -> None:
    """Its request fails with the cause named; the next one runs in a new life of the stage (fault 30)."""
    before = api.result(api.submit_patiently("breakable"))
    error = api.failed(api.submit_patiently("breakable", {"fault": fault}))
    assert error["error"] == "StageFailed"
    assert error["fields"]["cause"] == cause
    assert "fragile" in error["message"]
    assert api.result(api.submit_patiently("breakable")) > before


def test_stage_that_raises_keeps_its_state(api: Api) -> None:
    """An ordinary exception fails its request, with the traceback's end, and nothing is loaded anew."""
    error = api.failed(api.submit("chain", {"failure": "raise", "failing_stage": "second"}))
    assert error["error"] == "StageFailed"
    assert error["fields"]["stage"] == "second"
    assert error["fields"]["cause"] == "RuntimeError"
    assert "asked to fail" in error["message"]
    assert "synthetic.py" in error["fields"]["traceback"]
    assert api.run("chain").digest == expected_digest("chain")


@pytest.mark.parametrize("failing", ["split", "right"])
def test_stage_that_returns_what_its_signature_denies(api: Api, failing: str) -> None:
    """The request fails, naming what was returned and what the signature says."""
    error = api.failed(api.submit("diamond", {"failure": "wrong_type", "failing_stage": failing}))
    assert error["error"] == "StageFailed"
    assert error["fields"]["cause"] == "WrongType"
    assert "dict" in error["message"]


def test_events_of_a_failed_request_end_with_the_error(api: Api) -> None:
    """Who follows a request that fails sees the same error as the status shows."""
    uid = api.submit("chain", {"failure": "raise"})
    last = list(api.events(uid))[-1]
    assert last["kind"] == "failed"
    assert last["detail"]["error"] == "StageFailed"
    assert last["detail"] == api.status(uid)["error"]


def test_result_of_a_failed_request_is_its_error(api: Api) -> None:
    """Fetching the result of a failed request gives the failure, not an empty body."""
    uid = api.submit("chain", {"failure": "raise"})
    api.failed(uid)
    answer = api.client.get(f"/v1/requests/{uid}/result")
    assert answer.status_code == 500
    assert answer.json()["error"] == "StageFailed"


# --- cancel, deadline, keys --------------------------------------------------------------------


def test_cancel_a_running_request(api: Api) -> None:
    """A request that runs is cancelled at once, and its stage stops: the next request can run."""
    uid = api.submit("chain", {"seconds": [120.0, 0.0, 0.0], "steps": 6000})
    for event in api.events(uid):
        if event["kind"] == "progress":
            break
    assert api.cancel(uid)["state"] == "cancelled"
    assert api.run("chain", timeout_seconds=20).digest == expected_digest("chain")


def test_cancel_a_queued_request(api: Api) -> None:
    """A request that waits behind another one is cancelled without ever starting."""
    running = api.submit("chain", {"seconds": [120.0, 0.0, 0.0], "steps": 6000})
    api.reached(running, frozenset({"running"}))
    queued = api.submit("chain", {"seed": 1})
    assert api.cancel(queued)["state"] == "cancelled"
    assert [event["kind"] for event in api.events(queued) if event["kind"] == "stage_started"] == []
    assert api.cancel(running)["state"] == "cancelled"


def test_cancel_after_the_end_changes_nothing(api: Api) -> None:
    """Cancelling what has finished is no error, and the result stays."""
    uid = api.submit("plain", {"text": "kept"})
    api.ended(uid)
    assert api.cancel(uid)["state"] == "finished"
    assert api.result(uid).startswith("kept@")


def test_result_of_a_cancelled_request(api: Api) -> None:
    """Who asks for it learns that it was cancelled."""
    uid = api.submit("chain", {"seconds": 60.0, "steps": 6000})
    api.cancel(uid)
    answer = api.client.get(f"/v1/requests/{uid}/result")
    assert answer.status_code == 409
    assert answer.json()["error"] == "RequestCancelled"


def test_deadline_ends_a_running_request(api: Api) -> None:
    """A request past its deadline fails with DeadlineExceeded, and its stage stops."""
    uid = api.submit("chain", {"seconds": [120.0, 0.0, 0.0], "steps": 6000}, timeout_seconds=0.4)
    assert api.failed(uid)["error"] == "DeadlineExceeded"
    assert api.run("chain", timeout_seconds=20).digest == expected_digest("chain")


def test_idempotency_key_gives_the_first_request(api: Api) -> None:
    """The same key again is the same request, whose stages run once; another workflow may not take it."""
    first = api.post("plain", {"text": "order"}, key="order-17").json()
    again = api.post("plain", {"text": "order"}, key="order-17")
    assert again.json()["uid"] == first["uid"]
    clash = api.post("loud", {"text": "order"}, key="order-17")
    assert clash.status_code == 422
    assert clash.json()["fields"]["field"] == "key"


# --- bad input ---------------------------------------------------------------------------------


def test_unknown_workflow_lists_the_known(api: Api) -> None:
    """The error names those that are registered."""
    answer = api.post("dimond")
    assert answer.status_code == 404
    assert answer.json()["error"] == "UnknownWorkflow"
    assert "diamond" in answer.json()["message"]


@pytest.mark.parametrize(
    ("workflow", "inputs", "field"),
    [
        ("chain", {"secnods": 1.0}, "secnods"),
        ("plain", {}, "text"),
        ("plain", {"text": 5}, "text"),
        ("chain", {"seed": "one"}, "seed"),
        ("chain", {"seed": True}, "seed"),
        ("chain", {"cost": "free"}, "cost"),
        ("plain", {"text": None}, "text"),
        ("plain", {"text": "x" * (1 << 20)}, "text"),
        ("noop", {"payload": "a text"}, "payload"),
        ("noop", {"payload": {"$base64": "no base64!"}}, "payload"),
    ],
)
def test_bad_input_names_the_field(api: Api, workflow: str, inputs: dict[str, Any], field: str) -> None:
    """An unknown, missing, wrong or oversized field is refused by name, and the next request works."""
    answer = api.post(workflow, inputs)
    assert answer.status_code in {413, 422}, answer.text
    assert answer.json()["fields"]["field"] == field
    assert field in answer.json()["message"]
    assert api.run("plain", {"text": "next"}).startswith("next@")


def test_value_that_only_the_stage_can_refuse(api: Api) -> None:
    """What the types let through and the stage refuses fails the request, with the stage's own words."""
    error = api.failed(api.submit("chain", {"payload_bytes": [1, 2]}))
    assert "2 numbers for the 3 stages" in error["message"]


def test_list_shows_the_newest_first(api: Api) -> None:
    """The list of requests is ordered by acceptance, and can be filtered by state."""
    uids = [api.submit("plain", {"text": str(number)}) for number in range(3)]
    for uid in uids:
        api.ended(uid)
    listed = api.client.get("/v1/requests", params={"limit": "3", "state": "finished"}).json()["requests"]
    assert [each["uid"] for each in listed] == uids[::-1]
