"""The synthetic workflows check themselves, fail as asked, and their digest can be recomputed."""

import time
from collections.abc import Mapping
from typing import Any

import anyio
import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from onepiece import RequestCancelled, Workflow
from onepiece.codec import Unpacked, materialise, pack, select, unpack
from onepiece.graph import Constant, FromInput, FromStage, check_inputs, check_value
from onepiece.testing import RecordingContext, stage_context
from stages.synthetic import (
    CHAIN_STAGES,
    DIAMOND_STAGES,
    Failure,
    Outcome,
    Parcel,
    Task,
    chain,
    diamond,
    expected_digest,
    noop,
    pattern,
    second,
)


def over_the_wire(values: Mapping[str, Any]) -> Unpacked[None]:
    """The values as the next stage's node would find them."""
    return unpack(memoryview(b"".join(pack(None, values).parts)), type(None))


async def run_graph(
    flow: Workflow[..., Any], contexts: Mapping[str, RecordingContext[None]] | None = None, /, **inputs: Any
) -> Any:
    """Follow the graph one node after the other, every value over the wire."""
    given_inputs = over_the_wire(check_inputs(flow.graph, inputs)).values
    results: dict[str, Any] = {}
    for node in flow.graph.nodes:
        arguments = {}
        for parameter in flow.graph.stages[node.stage].parameters:
            match node.inputs[parameter.name]:
                case FromInput(name=name):
                    value = given_inputs[name]
                case FromStage(node=source, path=path):
                    value = select(results[source], path)
                case Constant(value=value):
                    pass
            arguments[parameter.name] = materialise(value, parameter.type)
        context = (contexts or {}).get(node.id) or stage_context()
        result = await flow.stages[node.stage].function(context, **arguments)
        assert check_value(flow.graph.stages[node.stage].returns, result) is None
        results[node.id] = over_the_wire({"value": result}).values["value"]
    return materialise(results[flow.graph.output.node], flow.graph.returns)


async def test_noop_gives_back_its_payload() -> None:
    """Three nodes of one stage, which change nothing."""
    assert [node.id for node in noop.graph.nodes] == ["relay", "relay_2", "relay_3"]
    assert await run_graph(noop, payload=b"x" * 5000) == b"x" * 5000


@pytest.mark.parametrize("payload_bytes", [0, 1, 7, 4096, 100_003, [0, 5000, 3]])
async def test_a_chain_returns_the_digest_that_a_client_computes(payload_bytes: int | list[int]) -> None:
    """Whatever the sizes: the payload is the last stage's, and the digest covers all of them."""
    outcome = await run_graph(chain, payload_bytes=payload_bytes, seed=5)
    assert isinstance(outcome, Outcome)
    assert outcome.digest == expected_digest("chain", payload_bytes, seed=5)
    last = payload_bytes if isinstance(payload_bytes, int) else payload_bytes[-1]
    assert np.array_equal(outcome.payload, pattern(5, "third", last))


@pytest.mark.parametrize("payload_bytes", [0, 4097, [1, 20_000, 300, 4]])
async def test_a_diamond_joins_both_sides(payload_bytes: int | list[int]) -> None:
    """The digest covers both sides of the join."""
    assert diamond.graph.predecessors("merge") == ("left", "right")
    outcome = await run_graph(diamond, payload_bytes=payload_bytes, seed=-3)
    assert outcome.digest == expected_digest("diamond", payload_bytes, seed=-3)


def test_digests_depend_on_everything() -> None:
    """Another seed, size or workflow: another digest."""
    digests = {
        expected_digest("chain", 10, 1),
        expected_digest("chain", 10, 2),
        expected_digest("chain", [10, 10, 11], 1),
        expected_digest("chain", [11, 10, 10], 1),
        expected_digest("diamond", 10, 1),
    }
    assert len(digests) == 5


@given(st.integers(-(1 << 63), 1 << 63), st.sampled_from(CHAIN_STAGES), st.integers(0, 3000))
@settings(deadline=None)
def test_patterns_repeat_and_look_random(seed: int, sender: str, payload_bytes: int) -> None:
    """The same request gives the same bytes; a shifted or repeated piece would be noticed."""
    one = pattern(seed, sender, payload_bytes)
    assert one.nbytes == payload_bytes
    assert np.array_equal(one, pattern(seed, sender, payload_bytes))
    assert not payload_bytes > 64 or not np.array_equal(one, pattern(seed + 1, sender, payload_bytes))
    for shift in (8, 64):
        if payload_bytes > 2 * shift:
            assert not np.array_equal(one[shift:], one[:-shift])


def parcel(payload_bytes: int = 100) -> Parcel:
    """What ``first`` sends to ``second``."""
    task = Task((0.0,) * 3, (payload_bytes,) * 3, 1, "sleep", 9, "none", "second", False)
    return Parcel(task, "first", pattern(9, "first", payload_bytes), "digest")


@pytest.mark.parametrize("place", [0, 50, 99])
async def test_a_damaged_byte_is_noticed(place: int) -> None:
    """One bit anywhere in the payload: the receiving stage fails and says where."""
    damaged = parcel()
    damaged.payload[place] ^= 1
    with pytest.raises(ValueError, match=f"1 of 100 bytes from 'first' are damaged, first at {place}"):
        await second.function(stage_context(), damaged)


async def test_a_misrouted_or_cut_parcel_is_noticed() -> None:
    """A parcel of another stage, or one that lost bytes, is not worked on."""
    with pytest.raises(ValueError, match="a parcel of 'third' arrived where 'first' sends"):
        await second.function(stage_context(), evolve(parcel(), sender="third"))
    with pytest.raises(ValueError, match="where 100 were sent"):
        await second.function(stage_context(), evolve(parcel(), payload=parcel().payload[1:]))


async def test_parcels_of_two_requests_are_not_joined() -> None:
    """A join that mixed up requests would be noticed, even without payload."""
    merge = diamond.stages["stages.synthetic:merge"]
    task = Task((0.0,) * 4, (0,) * 4, 1, "sleep", 1, "none", "left", False)
    left = Parcel(task, "left", pattern(1, "left", 0), "a")
    right = Parcel(evolve(task, seed=2), "right", pattern(2, "right", 0), "b")
    with pytest.raises(ValueError, match="two requests were joined"):
        await merge.function(stage_context(), left, right)


FAILURES: dict[Failure, type[BaseException]] = {
    "raise": RuntimeError,
    "exit": SystemExit,
    "interrupt": KeyboardInterrupt,
    "memory": MemoryError,
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("stage_name", CHAIN_STAGES)
async def test_a_stage_fails_as_asked(failure: Failure, stage_name: str) -> None:
    """At the named stage, in the named way, after its work."""
    context = stage_context()
    with pytest.raises(FAILURES[failure]):
        await run_graph(chain, {stage_name: context}, failure=failure, failing_stage=stage_name, steps=2)
    assert context.reports[-1] == {"step": 2, "total": 2}


async def test_a_wrong_type_is_returned_as_asked() -> None:
    """The stage returns a dict where its signature says Parcel, which check_value describes."""
    result = await second.function(
        stage_context(), evolve(parcel(), task=evolve(parcel().task, failure="wrong_type"))
    )
    why = check_value(second.spec.returns, result)
    assert why is not None
    assert why.startswith("a dict where Parcel(")


async def test_a_failure_can_be_for_the_first_attempt_only() -> None:
    """The second attempt goes through, so that what repeats a stage can be tested."""
    again = stage_context()
    again.attempt = 2
    outcome = await run_graph(chain, {"second": again}, failure="raise", first_attempt_only=True)
    assert outcome.digest == expected_digest("chain")
    with pytest.raises(RuntimeError):
        await run_graph(chain, {"second": again}, failure="raise")


async def test_a_hanging_stage_can_be_cancelled() -> None:
    """``hang`` waits for ever, and ends when it is told to."""
    started = anyio.Event()

    async def hang() -> None:
        started.set()
        await run_graph(chain, failure="hang")

    async with anyio.create_task_group() as group:
        group.start_soon(hang)
        await started.wait()
        group.cancel_scope.cancel()
    assert group.cancel_scope.cancelled_caught


@pytest.mark.parametrize("cost", ["sleep", "spin"])
async def test_work_takes_its_time_in_steps(cost: str) -> None:
    """Each step is reported, and the whole takes no less than was asked for."""
    context = stage_context()
    before = time.perf_counter()
    await run_graph(chain, {"first": context}, seconds=[0.02, 0.0, 0.0], steps=4, cost=cost)
    assert time.perf_counter() - before >= 0.02
    assert context.reports == [{"step": step, "total": 4} for step in (1, 2, 3, 4)]


async def test_work_stops_when_it_is_cancelled() -> None:
    """The next report of a cancelled request raises, long before the work would be done."""
    context = stage_context()
    context.cancel()
    with pytest.raises(RequestCancelled):
        await run_graph(chain, {"second": context}, seconds=[0.0, 10.0, 0.0], steps=1000)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"seconds": -1.0}, "seconds are -1.0"),
        ({"seconds": [1.0]}, "1 numbers for the 3 stages first, second, third"),
        ({"seconds": float("nan")}, "seconds are nan"),
        ({"payload_bytes": -1}, "payload_bytes are -1"),
        ({"payload_bytes": 1 << 40}, "from 0 to 4294967296"),
        ({"steps": 0}, "steps is 0"),
        ({"failing_stage": "fourth"}, "the stages are first, second, third"),
    ],
)
async def test_a_task_that_makes_no_sense_is_refused(inputs: dict[str, Any], words: str) -> None:
    """What the types alone let through fails in the first stage, with the field named."""
    with pytest.raises(ValueError, match=words):
        await run_graph(chain, **inputs)


def test_the_stages_are_named_as_documented() -> None:
    """The names that ``failing_stage`` takes are the graph's nodes."""
    assert tuple(node.id for node in chain.graph.nodes) == CHAIN_STAGES
    assert tuple(node.id for node in diamond.graph.nodes) == DIAMOND_STAGES
