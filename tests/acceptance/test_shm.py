"""Node processes on one host, told nothing but tcp addresses: payloads go through shared memory."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.synthetic import expected_digest
from tests.acceptance.node_set import NodeProcess, NodeSet, eventually, start_set


@pytest.fixture
def on_one_host(tmp_path: Path) -> Iterator[NodeSet]:
    """A seed and two workers with addresses of tcp, as everybody starts them."""
    with start_set("stages.synthetic:diamond", directory=tmp_path / "set", workers=2) as a_set:
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


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.full)])
def test_nodes_of_a_host_share_memory_unasked(on_one_host: NodeSet, kills: int) -> None:
    """Payloads arrive through other nodes' memory; what a killed node lent is let go of (fault 67)."""
    for _ in range(kills):
        kill_one_that_lends(on_one_host)
    outcome = on_one_host.api().run("diamond", {"payload_bytes": 2_000_000, "seed": 5})
    assert outcome.digest == expected_digest("diamond", 2_000_000, seed=5)


def kill_one_that_lends(on_one_host: NodeSet) -> None:
    """Kill a worker whose memory others have mapped: they let go of it, and another one takes its place."""
    seed, (killed, living), api = on_one_host.seed, on_one_host.workers, on_one_host.api()
    outcome = api.run("diamond", {"payload_bytes": 3_000_000, "seed": 1})
    assert outcome.digest == expected_digest("diamond", 3_000_000, seed=1)
    lent = {number for number, count in memories(killed).items() if count > 1}
    assert lent & (memories(seed) + memories(living)).keys(), "nobody has mapped the worker's memory"
    killed.kill()
    on_one_host.forget(killed)
    eventually(
        lambda: not lent & (memories(seed) + memories(living)).keys(),
        "the end of the dead worker's memory",
    )
    on_one_host.start_worker()
    on_one_host.wait_ready()
