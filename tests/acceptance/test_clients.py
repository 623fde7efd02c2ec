"""The Python client against real nodes: what a user's program sees."""

from pathlib import Path

import pytest

import onepiece
from onepiece import InvalidInput, RequestCancelled, ResultGone, StageFailed, UnknownWorkflow
from onepiece.requests import EventKind, RequestState
from stages.synthetic import CHAIN_STAGES, chain, diamond, expected_digest, noop
from tests.acceptance.node_set import NodeSet
from tests.acceptance.own_stages import breakable, loud, many_bytes


async def test_submit_follow_and_fetch(five: NodeSet) -> None:
    """A call of a workflow is submitted, followed to its end, and gives a value of the declared type."""
    async with onepiece.connect(five.seed.http) as client:
        await client.wait_ready(timeout=20)
        request = await client.submit(chain(steps=2, payload_bytes=1000, seed=5), timeout=30)
        events = [event async for event in request.events()]
        outcome = await request.result()
    assert outcome.digest == expected_digest("chain", 1000, 5)
    assert outcome.payload.nbytes == 1000
    assert events[-1].kind is EventKind.FINISHED
    finished = [event.stage for event in events if event.kind is EventKind.STAGE_FINISHED]
    assert sorted(map(str, finished)) == sorted(CHAIN_STAGES)


async def test_reattach_by_uid(five: NodeSet) -> None:
    """Another client that knows no more than the UID gets the same result, and the result only once."""
    async with onepiece.connect(five.seed.http) as one, onepiece.connect(five.seed.http) as other:
        request = await one.submit(diamond(payload_bytes=10))
        outcome = await other.attach(request.uid, diamond).result()
        assert outcome.digest == expected_digest("diamond", 10)
        with pytest.raises(ResultGone):
            await request.result()


async def test_errors_come_as_what_they_are(five: NodeSet) -> None:
    """A failed stage, a cancelled request and bad input raise their own errors with their fields."""
    async with onepiece.connect(five.seed.http) as client:
        failing = await client.submit(chain(failure="raise", failing_stage="third"))
        with pytest.raises(StageFailed) as failed:
            await failing.result()
        assert failed.value.fields["stage"] == "third"
        broken = await client.submit(breakable(fault="exit"))
        with pytest.raises(StageFailed, match="SystemExit"):
            await broken.result()
        endless = await client.submit(chain(seconds=[0.0, 60.0, 0.0], steps=6000))
        assert (await endless.cancel()).state is RequestState.CANCELLED
        with pytest.raises(RequestCancelled):
            await endless.result()
        with pytest.raises(InvalidInput, match="wind"):
            await client.submit("chain", {"wind": "north"})
        with pytest.raises(UnknownWorkflow, match="diamond"):
            await client.submit("dimond", {})
        assert await (await client.submit(loud(text="next"))).result()


async def test_key_submits_once(five: NodeSet) -> None:
    """Submitting again under the same key, as after a lost answer, gives the same request."""
    async with onepiece.connect(five.seed.http) as client:
        one = await client.submit(noop(payload=b"paid"), key="invoice-1")
        again = await client.submit(noop(payload=b"paid"), key="invoice-1")
        assert one.uid == again.uid
        assert await again.result() == b"paid"


async def test_nodes_workflows_and_requests_are_listed(five: NodeSet) -> None:
    """What an operator lists is what runs."""
    async with onepiece.connect(five.seed.http) as client:
        nodes = await client.nodes()
        assert {node.process_id for node in nodes} == {node.pid for node in five.nodes}
        workflows = {workflow.name: workflow for workflow in await client.workflows()}
        assert [each.name for each in workflows["noop"].inputs] == ["payload"]
        request = await client.submit(noop())
        await request.wait()
        assert request.uid in {status.uid for status in await client.requests(limit=5, state="finished")}


def test_blocking_twin(five: NodeSet, tmp_path: Path) -> None:
    """A program without a loop does the same: follow, fetch, save."""
    with onepiece.connect_blocking(five.seed.http) as client:
        request = client.submit(chain(steps=2))
        assert [event.kind for event in request.events()][-1] is EventKind.FINISHED
        assert request.result().digest == expected_digest("chain")
        size = client.submit(many_bytes(mebibytes=3)).save(tmp_path / "bytes")
        assert size == (tmp_path / "bytes").stat().st_size == 3 << 20
