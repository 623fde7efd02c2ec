"""Node processes on one host, told nothing but tcp addresses: payloads go through shared memory."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.synthetic import expected_digest
from tests.acceptance.http_api import Api, as_json
from tests.acceptance.node_set import STARVED_SECONDS, NodeProcess, NodeSet, eventually, start_set


@pytest.fixture
def on_one_host(tmp_path: Path) -> Iterator[NodeSet]:
    """A seed and two workers with addresses of tcp, as everybody starts them."""
    served = ("stages.synthetic:diamond", "stages.synthetic:noop")
    with start_set(*served, directory=tmp_path / "set", workers=2) as a_set:
        yield a_set


def memories(process: NodeProcess) -> Counter[int]:
    """The regions' memories that a process has descriptors of: its own twice, those of others once."""
    found: Counter[int] = Counter()
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            if "memfd:onepiece-region" in str(descriptor.readlink()):
                found[descriptor.stat().st_ino] += 1
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def lent(process: NodeProcess) -> set[int]:
    """The memories of its own regions."""
    return {number for number, count in memories(process).items() if count > 1}


def run_diamond(api: Api, payload_bytes: int, seed: int) -> None:
    """Have large payloads go from worker to worker; each byte must be right."""
    inputs = {"payload_bytes": payload_bytes, "seed": seed}
    outcome = api.result(api.submit_patiently("diamond", inputs))
    assert outcome.digest == expected_digest("diamond", payload_bytes, seed=seed)


def run_noop(api: Api) -> None:
    """Have a large input go from the seed to whichever worker has the first stage."""
    payload = bytes(3_000_000)
    assert api.result(api.submit_patiently("noop", {"payload": as_json(payload)})) == payload


KILLS_MAX = 50


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(1, marks=pytest.mark.timeout(240)),
        pytest.param(
            KILLS_MAX, marks=[pytest.mark.full, pytest.mark.timeout(STARVED_SECONDS + 40 * KILLS_MAX)]
        ),
    ],
)
def test_nodes_of_a_host_share_memory_unasked(on_one_host: NodeSet, kills: int) -> None:
    """Payloads arrive through other nodes' memory; what a killed node lent is let go of (fault 67)."""
    for _ in range(kills):
        kill_one_that_lends(on_one_host)
    run_diamond(on_one_host.api(), 2_000_000, seed=5)


def kill_one_that_lends(on_one_host: NodeSet) -> None:
    """Kill a worker whose memory others have mapped: they let go of it, and another one takes its place.

    Where the other one joined too late all stages are on one worker, whose memory the seed has mapped.
    """
    seed, api = on_one_host.seed, on_one_host.api()
    run_diamond(api, 3_000_000, seed=1)
    run_noop(api)
    killed = next(worker for worker in on_one_host.workers if lent(worker) & memories(seed).keys())
    [living] = set(on_one_host.workers) - {killed}
    lent_by_it = lent(killed)
    killed.kill()
    on_one_host.forget(killed)
    eventually(
        lambda: not lent_by_it & (memories(seed) + memories(living)).keys(),
        "the end of the dead worker's memory",
    )
    joining = on_one_host.start_worker()
    joining.wait_listening(STARVED_SECONDS)
    eventually(lambda: joining.node_id in api.nodes(), "another worker has joined")
