"""Nodes that die, stop, and come back: requests end, actors are placed again, and results stay."""

import concurrent.futures
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from stages.synthetic import CHAIN_STAGES, expected_digest
from tests.acceptance.http_api import Api, as_json
from tests.acceptance.node_set import NodeProcess, NodeSet, eventually, start_set

WORKFLOWS = ("stages.synthetic:chain", "stages.synthetic:noop", "tests.acceptance.own_stages:slow_start")
SEED = ("--name", "seed", "--lease-seconds", "1.6", "--heartbeat-seconds", "0.2")
"""A death is noticed within two seconds."""
WORKER = ("--heartbeat-seconds", "0.2")


@pytest.fixture(scope="module")
def long_lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeSet]:
    """A seed that can be started again, and two workers."""
    directory = tmp_path_factory.mktemp("trio")
    options = (*SEED, "--state-dir", str(directory / "state"))
    with start_set(
        *WORKFLOWS, directory=directory / "set", workers=2, options=options, worker_options=WORKER
    ) as a_set:
        yield a_set


@pytest.fixture
def trio(long_lived: NodeSet) -> NodeSet:
    """The set, ready, and with two workers, whatever the test before has done to it."""
    while len(long_lived.workers) < 2:
        long_lived.start_worker(*WORKER)
    long_lived.wait_ready()
    wanted = {worker.node_id for worker in long_lived.workers}
    eventually(lambda: wanted <= long_lived.api().nodes().keys(), "all workers have joined")
    return long_lived


def worker_of(a_set: NodeSet, stage: str) -> NodeProcess:
    """The process that runs a stage."""
    for node_id, node in a_set.api().nodes().items():
        if any(actor["stage"].endswith(f":{stage}") for actor in node["actors"]):
            return a_set.named(node_id)
    raise AssertionError(f"nobody runs {stage}:\n{a_set.logs()}")


def running_in(api: Api, stage: str, **more: Any) -> str:
    """Submit a chain that stays in this stage; its UID once it is there."""
    seconds = [120.0 if name == stage else 0.0 for name in CHAIN_STAGES]
    uid = api.submit("chain", {"seconds": seconds, "steps": 6000}, **more)
    eventually(lambda: running_stage(api, uid) == stage, f"it runs in {stage}")
    return uid


def running_stage(api: Api, uid: str) -> str | None:
    """The stage that a request is in."""
    stages = api.status(uid)["stages"]
    return next((name for name, state in stages.items() if state == "running"), None)


def test_killed_worker(trio: NodeSet) -> None:
    """Readiness turns red with the reason, its requests end in NodeLost, and the set recovers (fault 33)."""
    api = trio.api()
    victim = worker_of(trio, "slow_to_load")
    uid = next(running_in(api, stage) for stage in CHAIN_STAGES if worker_of(trio, stage) is victim)
    victim.kill()
    red = turned_red(api)
    assert red["live"]
    assert any("slow_to_load" in reason for reason in red["waiting_for"]), red
    error = api.failed(uid)
    assert error["error"] == "NodeLost"
    assert victim.node_id in error["message"]
    eventually(lambda: api.readiness()["ready"], "actors are placed again")
    assert victim.node_id not in api.nodes()
    assert api.run("slow_start", {"text": "ahoy"}) == "ahoy"
    assert api.run("chain").digest == expected_digest("chain")


def test_stage_that_kills_its_process(trio: NodeSet) -> None:
    """A stage that takes its process along fails its own request, not the set (fault 33)."""
    api = trio.api()
    victim = worker_of(trio, "second")
    error = api.failed(api.submit("chain", {"failure": "kill", "failing_stage": "second"}))
    assert error["error"] == "NodeLost"
    victim.wait_killed()
    trio.wait_ready()
    assert api.run("chain").digest == expected_digest("chain")


def test_stopped_worker_joins_anew(trio: NodeSet) -> None:
    """A node that stood still beyond its lease is expelled when it goes on, and joins anew."""
    api = trio.api()
    victim = worker_of(trio, "second")
    before = api.nodes()[victim.node_id]["incarnation"]
    uid = running_in(api, "second")
    victim.signal(signal.SIGSTOP)
    try:
        assert api.failed(uid)["error"] == "NodeLost"
        eventually(lambda: api.readiness()["ready"], "the other worker took over")
        assert api.run("chain").digest == expected_digest("chain")
    finally:
        victim.signal(signal.SIGCONT)
    eventually(
        lambda: (
            (node := api.nodes().get(victim.node_id))
            and node["state"] == "alive"
            and node["incarnation"] > before
        ),
        "the stopped node is back under a higher incarnation",
    )
    assert "node_expelled" in victim.log()
    [other] = [worker for worker in trio.workers if worker is not victim]
    other.kill()  # now the one that came back must take over
    eventually(lambda: other.node_id not in api.nodes(), "the other worker's death is noticed")
    trio.wait_ready()
    assert worker_of(trio, "second") is victim
    assert api.run("chain").digest == expected_digest("chain")


def test_busy_stage_does_not_cost_its_node_the_lease(trio: NodeSet) -> None:
    """A stage that computes in pure Python for longer than the lease leaves the heartbeats alone."""
    api = trio.api()
    before = {node_id: node["incarnation"] for node_id, node in api.nodes().items()}
    busy = {"seconds": [0.0, 2.5, 0.0], "cost": "spin", "steps": 1}
    assert api.run("chain", busy).digest == expected_digest("chain")
    assert {node_id: node["incarnation"] for node_id, node in api.nodes().items()} == before


def test_deaths_under_load(trio: NodeSet) -> None:
    """While workers die and come, every request ends: with its own result, or an error that says why."""
    over = threading.Event()

    def submit(seed: int) -> list[tuple[str, str]]:
        outcomes = []
        with Api(trio.seed.http) as api:
            while not over.is_set():
                answer = api.post("chain", {"seed": seed, "payload_bytes": 20_000, "seconds": 0.005})
                if answer.status_code != 202:
                    outcomes.append(("refused", answer.json()["error"]))
                    time.sleep(0.05)
                    continue
                uid = answer.json()["uid"]
                status = api.ended(uid)
                if status["state"] == "finished":
                    outcomes.append(("finished", api.result(uid).digest))
                else:
                    outcomes.append((status["state"], status["error"]["error"]))
        return outcomes

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        running = [threads.submit(submit, seed) for seed in range(4)]
        try:
            for _ in range(2):
                worker_of(trio, "second").kill()
                trio.start_worker(*WORKER)
                trio.wait_ready()
                assert trio.api().run("chain", timeout_seconds=20).digest == expected_digest("chain")
        finally:
            over.set()
    for seed, future in enumerate(running):
        wanted = expected_digest("chain", 20_000, seed)
        kinds = {"finished": {wanted}, "failed": {"NodeLost"}, "refused": {"NotReady"}}
        for state, detail in future.result():
            assert detail in kinds[state], (state, detail)
        assert ("finished", wanted) in future.result()


def test_new_worker_takes_the_place_of_the_dead(trio: NodeSet) -> None:
    """Where no room is left readiness stays red and says what is missing, until a worker joins."""
    api = trio.api()
    for worker in trio.workers:
        worker.kill()
    red = turned_red(api)
    assert any("relay" in reason for reason in red["waiting_for"]), red
    refused = api.post("noop")
    assert refused.status_code == 503
    assert refused.json()["error"] == "NotReady"
    trio.start_worker(*WORKER)
    trio.wait_ready()
    assert api.run("noop") == b""


def start_seed_again(a_set: NodeSet) -> None:
    """Start a seed in the place of the one that was killed."""
    before = a_set.seed
    named = [part for workflow in WORKFLOWS for part in ("--workflow", workflow)]
    state = str(a_set.directory.parent / "state")
    a_set.start(
        *("--roles", "proxy,manager,store", *SEED, *named, "--state-dir", state),
        *("--listen", before.address, "--http", before.http.removeprefix("http://")),
        as_seed=True,
    )
    assert (a_set.seed.address, a_set.seed.http) == (before.address, before.http)
    a_set.wait_ready()


def test_killed_seed_comes_back(trio: NodeSet) -> None:
    """Manager, store and proxy die and start again: workers rejoin, acknowledged results are served."""
    api = trio.api()
    kept = api.submit("noop", {"payload": as_json(b"ahoy")})
    assert api.result(kept) == b"ahoy"
    actors = actors_of(api)
    trio.seed.kill()
    start_seed_again(trio)
    fetched = api.client.get(f"/v1/requests/{kept}/result", params={"keep": "1"})
    assert fetched.status_code == 200, fetched.text
    assert fetched.content == b"ahoy"
    assert api.run("chain").digest == expected_digest("chain")
    eventually(lambda: actors_of(api) == actors, "the workers kept what they had loaded")
    assert len(trio.workers) == 2


def turned_red(api: Api) -> dict[str, Any]:
    """What readiness says once it is red."""

    def look() -> dict[str, Any] | None:
        found = api.readiness()
        return None if found["ready"] else found

    return eventually(look, "readiness turns red")


def actors_of(api: Api) -> set[tuple[str, int, str]]:
    """Node, id and stage of every actor."""
    return {
        (node_id, actor["actor"], actor["stage"])
        for node_id, node in api.nodes().items()
        for actor in node["actors"]
    }


def test_request_of_a_proxy_that_died(trio: NodeSet) -> None:
    """It is unknown to the next proxy, and its stages stop: they are not in the way of new requests."""
    api = trio.api()
    uid = running_in(api, "second", timeout_seconds=600.0)
    trio.seed.kill()
    start_seed_again(trio)
    assert api.client.get(f"/v1/requests/{uid}").status_code == 404
    assert api.run("chain", timeout_seconds=30).digest == expected_digest("chain")


def test_stopped_proxy_ends_its_requests(trio: NodeSet) -> None:
    """A proxy that stood still beyond its lease tells that its requests are lost; their stages stopped."""
    joining = ("--roles", "proxy", "--join", trio.seed.address)
    proxy = trio.start(*joining, *WORKER)
    trio.wait_ready(proxy)
    api = trio.api(proxy)
    uid = running_in(api, "second", timeout_seconds=600.0)
    proxy.signal(signal.SIGSTOP)
    try:
        eventually(lambda: proxy.node_id not in trio.api().nodes(), "it is declared dead")
        assert trio.api().run("chain", timeout_seconds=30).digest == expected_digest("chain")
    finally:
        proxy.signal(signal.SIGCONT)
    error = api.failed(uid)
    assert error["error"] == "NodeLost"
    assert "out of reach" in error["message"] or "is gone" in error["message"]
    eventually(lambda: proxy.node_id in trio.api().nodes(), "it is back")
    assert api.run("chain").digest == expected_digest("chain")
    proxy.signal(signal.SIGTERM)
    assert proxy.wait() == 0
