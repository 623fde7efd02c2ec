"""Nodes that stop: what they finish, how long they may take, and what they say."""

import concurrent.futures
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onepiece.node.stopping import ONE_SIGNAL_SECONDS
from stages.synthetic import CHAIN_STAGES, expected_digest
from tests.acceptance.http_api import Api
from tests.acceptance.node_set import STARVED_SECONDS, NodeProcess, NodeSet, eventually, open_set

AT_ONCE = 130
UNFINISHED = 1
SEED = ("--roles", "proxy,manager,store", "--workflow", "stages.synthetic:chain")
NOBODY_ELSE = ("--delivery-seconds", "1")
"""How long the seed waits for another worker, where none comes."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[NodeSet]:
    """A seed without actors, and a worker."""
    with open_set(tmp_path / "set") as a_set:
        a_set.start(*SEED)
        a_set.start_worker()
        a_set.wait_ready()
        yield a_set


@pytest.fixture(scope="module")
def long_lived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeSet]:
    """A seed without actors; tests start the workers that they stop. No other comes in their place."""
    with open_set(tmp_path_factory.mktemp("impatient") / "set") as a_set:
        a_set.start(*SEED, *NOBODY_ELSE)
        yield a_set


@pytest.fixture
def impatient(long_lived: NodeSet) -> NodeSet:
    """The seed and a worker that drains for half a second at most."""
    long_lived.start_worker("--drain-seconds", "0.5")
    long_lived.wait_ready()
    return long_lived


def started(api: Api, stage: str, **inputs: object) -> str:
    """Submit a chain; its UID once it runs in this stage."""
    uid = api.submit("chain", inputs)
    eventually(lambda: api.status(uid)["stages"][stage] == "running", f"it runs in {stage}")
    return uid


def stop(node: NodeProcess, *, expected: int) -> None:
    """Send SIGTERM; the node must end with this status."""
    node.signal(signal.SIGTERM)
    assert node.wait() == expected, node.log()


def test_worker_finishes_what_runs(pair: NodeSet) -> None:
    """A worker that drains finishes the stage that runs; what comes next finds another worker."""
    api = pair.api()
    [leaving] = pair.workers
    uid = started(api, "first", seconds=[0.6, 0.0, 0.0])
    leaving.signal(signal.SIGTERM)
    pair.start_worker()
    assert leaving.wait() == 0
    assert "drained=true" in leaving.log()
    assert api.result(uid).digest == expected_digest("chain")


def test_draining_actors_are_replaced_first(tmp_path: Path) -> None:
    """Where another worker has room the actors move before the old ones end: no request fails."""
    with open_set(tmp_path / "set") as a_set:
        a_set.start(*SEED)
        a_set.start_worker()
        a_set.wait_ready()
        [leaving] = a_set.workers
        staying = a_set.start_worker()
        eventually(lambda: staying.node_id in a_set.api().nodes(), "the other worker has joined")

        def one(seed: int) -> bool:
            with Api(a_set.seed.http) as own:
                if seed == 10:
                    leaving.signal(signal.SIGTERM)
                got = own.run("chain", {"seed": seed, "payload_bytes": 1000, "seconds": 0.01})
            return bool(got.digest == expected_digest("chain", 1000, seed))

        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            assert all(threads.map(one, range(40)))
        assert leaving.wait() == 0


def test_drain_is_bounded(impatient: NodeSet) -> None:
    """A stage that outlasts the bound is stopped, its request ends in NodeLost, the status says so."""
    api = impatient.api()
    [leaving] = impatient.workers
    uid = started(api, "first", seconds=[120.0, 0.0, 0.0], steps=6000)
    stop(leaving, expected=UNFINISHED)
    assert "drained=false" in leaving.log()
    assert api.failed(uid)["error"] == "NodeLost"


@pytest.mark.parametrize("failure", ["hang", "block"])
def test_stage_that_never_returns_cannot_keep_its_node(impatient: NodeSet, failure: str) -> None:
    """A node whose stage ignores everything ends in bounded time all the same."""
    api = impatient.api()
    uid = api.submit("chain", {"failure": failure, "failing_stage": CHAIN_STAGES[0]})
    eventually(lambda: api.status(uid)["stages"]["first"] == "running", "it runs")
    stop(impatient.workers[0], expected=UNFINISHED)
    assert api.failed(uid)["error"] == "NodeLost"


def test_second_signal_stops_at_once(tmp_path: Path) -> None:
    """A node that drains for minutes ends at the second signal, with a status of its own (fault 127)."""
    with open_set(tmp_path / "set") as a_set:
        a_set.start(*SEED, *NOBODY_ELSE)
        a_set.start_worker("--drain-seconds", "600")
        a_set.wait_ready()
        [worker] = a_set.workers
        uid = started(a_set.api(), "first", failure="block", failing_stage="first")
        worker.signal(signal.SIGTERM)
        eventually(lambda: "node_draining" in worker.log(), "it drains")
        echo_until = time.monotonic() + ONE_SIGNAL_SECONDS
        eventually(lambda: time.monotonic() > echo_until, "a time when it takes a signal for another one")
        stop(worker, expected=AT_ONCE)
        assert a_set.api().failed(uid)["error"] == "NodeLost"


def test_proxy_that_drains(pair: NodeSet) -> None:
    """It finishes its requests, takes no new ones, and is not ready while it still answers (fault 129)."""
    api = pair.api()
    uid = started(api, "second", seconds=[0.0, 1.5, 0.0])
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        following = threads.submit(lambda: [event["kind"] for event in api.events(uid)])
        pair.seed.signal(signal.SIGTERM)
        eventually(lambda: api.readiness()["draining"], "it says that it drains")
        assert api.client.get("/readyz").status_code == 503
        refused = api.post("chain")
        assert refused.status_code == 503
        assert "draining" in refused.json()["message"]
        assert following.result()[-1] == "finished"
    assert pair.seed.wait() == 0


def test_interrupt_is_as_good_as_terminate(tmp_path: Path) -> None:
    """SIGINT, as Ctrl-C sends it, drains as well."""
    with open_set(tmp_path / "set") as a_set:
        node = a_set.start("--devices", "cpu:0=1GiB", "--workflow", "stages.echo:echo")
        a_set.wait_ready()
        node.signal(signal.SIGINT)
        assert node.wait() == 0


def test_signal_before_it_is_up(tmp_path: Path) -> None:
    """A node that is told to stop while it starts ends in order."""
    with open_set(tmp_path / "set") as a_set:
        node = a_set.start("--devices", "cpu:0=1GiB", "--workflow", "tests.acceptance.own_stages:slow_start")
        node.wait_listening()
        node.signal(signal.SIGTERM)
        assert node.wait() == 0


KILLS_MAX = 100


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(1, marks=pytest.mark.timeout(240)),
        pytest.param(
            KILLS_MAX, marks=[pytest.mark.full, pytest.mark.timeout(STARVED_SECONDS + 30 * KILLS_MAX)]
        ),
    ],
)
def test_killed_node_leaves_nothing_for_long(tmp_path: Path, kills: int) -> None:
    """The directory of a node that was killed is removed by the next one that starts (faults 39, 67)."""
    with open_set(tmp_path / "set") as a_set:
        killed = a_set.start("--devices", "cpu:0=1GiB")
        killed.wait_listening()
        [left] = a_set.temporary.iterdir()
        living = a_set.start("--devices", "cpu:0=1GiB")
        living.wait_listening()
        assert left.exists(), "the directory of a node that runs was removed"
        [kept] = set(a_set.temporary.iterdir()) - {left}
        for _ in range(kills):
            killed.kill()
            a_set.forget(killed)
            killed = a_set.start("--devices", "cpu:0=1GiB")
            killed.wait_listening(STARVED_SECONDS)
            assert not left.exists()
            assert kept.exists(), "the directory of a node that runs was removed"
            [left] = set(a_set.temporary.iterdir()) - {kept}
