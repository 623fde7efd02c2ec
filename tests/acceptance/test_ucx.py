"""Node processes whose bulk data go over UCX, with shared memory required: nothing less would do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.synthetic import expected_digest
from tests.acceptance.node_set import NodeSet, start_set
from transports import UnknownScheme, transport_for

LISTEN = ("--listen", "ucx://127.0.0.1:0?require=shm")


@pytest.fixture
def over_ucx(tmp_path: Path) -> Iterator[NodeSet]:
    """A seed and two workers that reach each other over ucx."""
    try:
        transport_for("ucx")
    except UnknownScheme as missing:
        pytest.skip(f"no libucp: {missing}")
    with start_set(
        "stages.synthetic:diamond",
        directory=tmp_path / "set",
        workers=2,
        options=LISTEN,
        worker_options=LISTEN,
    ) as a_set:
        yield a_set


def test_a_workflow_runs_over_ucx(over_ucx: NodeSet) -> None:
    """A fork and a join with small and large payloads; then again after a worker was killed and replaced."""
    api = over_ucx.api()
    assert over_ucx.seed.address.endswith("?require=shm")
    for size in (1, 3_000_000):
        outcome = api.run("diamond", {"payload_bytes": size, "seed": size})
        assert outcome.digest == expected_digest("diamond", size, seed=size)
    over_ucx.workers[0].kill()
    over_ucx.start_worker(*LISTEN)
    over_ucx.wait_ready()
    outcome = api.run("diamond", {"payload_bytes": 2_000_000, "seed": 5})
    assert outcome.digest == expected_digest("diamond", 2_000_000, seed=5)
