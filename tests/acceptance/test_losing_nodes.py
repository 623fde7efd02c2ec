"""Nodes that die, stop, and come back: requests go on elsewhere, actors are placed again, results stay."""

import concurrent.futures
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.synthetic import CHAIN_STAGES, expected_digest
from tests.acceptance.http_api import Api, as_json
from tests.acceptance.node_set import NodeProcess, NodeSet, eventually, open_set, start_set

WORKFLOWS = (
    "stages.synthetic:chain",
    "stages.synthetic:noop",
    "tests.acceptance.own_stages:slow_start",
    "tests.acceptance.own_stages:computing",
)
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


def running_in(api: Api, stage: str, seconds: float = 3.0, **more: Any) -> str:
    """Submit a chain that stays in this stage for a while; its UID once it is there."""
    spent = [seconds if name == stage else 0.0 for name in CHAIN_STAGES]
    uid = api.submit("chain", {"seconds": spent, "steps": 100}, **more)
    eventually(lambda: running_stage(api, uid) == stage, f"it runs in {stage}")
    return uid


def running_stage(api: Api, uid: str) -> str | None:
    """The stage that a request is in."""
    stages = api.status(uid)["stages"]
    return next((name for name, state in stages.items() if state == "running"), None)


def test_killed_worker(trio: NodeSet) -> None:
    """Readiness turns red and says why; requests finish elsewhere, and the set recovers (faults 3, 33)."""
    api = trio.api()
    victim = worker_of(trio, "slow_to_load")
    uid = next(running_in(api, stage) for stage in CHAIN_STAGES if worker_of(trio, stage) is victim)
    victim.kill()
    red = turned_red(api)
    assert red["live"]
    assert any("slow_to_load" in reason for reason in red["waiting_for"]), red
    assert api.result(uid).digest == expected_digest("chain")
    eventually(lambda: api.readiness()["ready"], "actors are placed again")
    assert victim.node_id not in api.nodes()
    assert api.run("slow_start", {"text": "ahoy"}) == "ahoy"
    assert api.run("chain").digest == expected_digest("chain")


def test_stage_that_kills_its_process_once(trio: NodeSet) -> None:
    """A node that its stage takes along costs the request time, not its result."""
    api = trio.api()
    victim = worker_of(trio, "second")
    poison = {"failure": "kill", "failing_stage": "second", "first_attempt_only": True}
    uid = api.submit("chain", poison)
    victim.wait_killed()
    assert api.result(uid).digest == expected_digest("chain")
    trio.wait_ready()
    assert api.run("chain").digest == expected_digest("chain")


def test_stage_that_kills_each_process(trio: NodeSet) -> None:
    """What kills whatever runs it costs two nodes, and then its own request, not the set (fault 21)."""
    api = trio.api()
    doomed = list(trio.workers)
    poison = {"failure": "kill", "failing_stage": "second", "seconds": [0.0, 0.5, 0.0]}
    uid = api.submit("chain", poison)
    for victim in doomed:
        victim.wait_killed()
    trio.start_worker(*WORKER)
    error = api.failed(uid)
    assert error["error"] == "StageFailed"
    assert "second" in error["message"]
    assert "the input kills the stage" in error["message"]
    trio.wait_ready()
    assert len(trio.workers) == 1, "the third worker is alive"
    assert api.run("chain").digest == expected_digest("chain")


def test_stage_that_kills_each_process_at_once(trio: NodeSet) -> None:
    """One that is dead before anybody hears that it began costs one node more, and is blamed all the same."""
    api = trio.api()
    before = set(trio.workers)
    uid = api.submit("chain", {"failure": "kill", "failing_stage": "second"})

    def ended() -> bool:
        for worker in before - set(trio.workers):
            worker.wait_killed()
        if len(trio.workers) < 2:
            before.add(trio.start_worker(*WORKER))
        return api.status(uid)["finished_at"] is not None

    eventually(ended, "it is given up")
    error = api.failed(uid)
    assert error["error"] == "StageFailed"
    assert "the input kills the stage" in error["message"]
    assert len(before - set(trio.workers)) <= 3
    trio.wait_ready()
    assert api.run("chain").digest == expected_digest("chain")


def test_stopped_worker_joins_anew(trio: NodeSet) -> None:
    """A node that stood still beyond its lease is expelled when it goes on, and joins anew (fault 20).

    Its request has gone on elsewhere by then; what it still does for it changes nothing.
    """
    api = trio.api()
    victim = worker_of(trio, "second")
    before = api.nodes()[victim.node_id]["incarnation"]
    uid = running_in(api, "second")
    victim.signal(signal.SIGSTOP)
    try:
        assert api.result(uid).digest == expected_digest("chain")
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


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seconds", [2.5, pytest.param(30.0, marks=pytest.mark.full)])
def test_busy_stage_does_not_cost_its_node_the_lease(trio: NodeSet, seconds: float) -> None:
    """One that computes in pure Python for longer than the lease leaves the heartbeats alone (fault 101)."""
    api = trio.api()
    before = {node_id: node["incarnation"] for node_id, node in api.nodes().items()}
    assert api.run("computing", {"seconds": seconds}) == "computed"
    assert {node_id: node["incarnation"] for node_id, node in api.nodes().items()} == before


def test_deaths_under_load(trio: NodeSet) -> None:
    """While workers die and come, every request that was accepted finishes, with its own result."""
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
        kinds = {"finished": {wanted}, "refused": {"NotReady"}}
        for state, detail in future.result():
            assert detail in kinds[state], (state, detail)
        assert ("finished", wanted) in future.result()


def test_new_worker_takes_the_place_of_the_dead(trio: NodeSet) -> None:
    """Where no room is left readiness stays red and says what is missing, until a worker joins."""
    api = trio.api()
    for worker in trio.workers:
        worker.kill()
    # Their deaths are noticed one after the other: only then nobody is left to run the stage.
    eventually(
        lambda: any("relay" in reason for reason in api.readiness()["waiting_for"]), "relay is waited for"
    )
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


def test_request_of_a_proxy_that_came_back(trio: NodeSet) -> None:
    """A lone proxy that is started again goes on with what it had accepted before."""
    api = trio.api()
    uid = running_in(api, "second", seconds=6.0)
    trio.seed.kill()
    start_seed_again(trio)
    status_patiently(api, uid)
    assert api.result(uid).digest == expected_digest("chain")
    assert api.run("chain").digest == expected_digest("chain")


def test_request_of_a_proxy_that_died(tmp_path: Path) -> None:
    """Another proxy goes on with it, and answers for it by its UID and by its key."""
    with open_set(tmp_path / "set") as a_set:
        named = [part for workflow in WORKFLOWS for part in ("--workflow", workflow)]
        seed = a_set.start("--roles", "manager,store", *SEED, *named, "--workers", "2")
        joining = ("--join", seed.address, *WORKER)
        owner, other = (
            a_set.start("--roles", "proxy,store", *joining, "--state-dir", str(tmp_path / name))
            for name in ("owner", "other")
        )
        for _ in range(2):
            a_set.start_worker(*WORKER)
        a_set.wait_ready(owner)
        a_set.wait_ready(other)
        uid = running_in(a_set.api(owner), "second", key="once")
        owner.kill()
        api = a_set.api(other)
        status_patiently(api, uid)
        assert api.result(uid).digest == expected_digest("chain")
        assert api.submit("chain", key="once") == uid


def status_patiently(api: Api, uid: str) -> dict[str, Any]:
    """A request's record, once a proxy that has just come to it answers for it."""

    def look() -> dict[str, Any] | None:
        answer = api.client.get(f"/v1/requests/{uid}")
        if answer.status_code == 200:
            found: dict[str, Any] = answer.json()
            return found
        assert answer.json()["error"] in {"NotReady", "OwnedElsewhere"}, answer.text
        return None

    return eventually(look, "a proxy answers for the request")
