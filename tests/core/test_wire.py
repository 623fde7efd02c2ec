"""What the control machines exchange survives the wire, and refuses what is wrong with it."""

import pytest
from attrs import evolve

from onepiece import Gpu, StageContext, Tensor, stage, workflow
from onepiece.codec import decode_control, encode_control
from onepiece.coordination._state_records import ManagerCounters
from onepiece.core import (
    ActorReport,
    ActorState,
    Assign,
    DeviceKind,
    Expel,
    RegisteredWorkflow,
    RouteEpoch,
    StageNeed,
    Unassign,
)
from onepiece.errors import CodecError
from onepiece.messages import Heartbeat
from tests.core.cluster import GIB, make_need, make_node, make_workflow


@stage(resources=Gpu(memory_gib=3), instances=2)
async def shout(ctx: StageContext[None], text: str) -> str:
    """A stage on a GPU."""
    return text.upper()


@stage
async def reverse(ctx: StageContext[None], text: str) -> str:
    """A stage that asks for nothing."""
    return text[::-1]


@workflow
def shout_backwards(text: str) -> str:
    """A workflow of both."""
    return reverse(shout(text))


_REPORT = ActorReport(
    7, "module:denoise", ("cuda:0",), ActorState.FAILED, queued=3, running=1, error="boom", digest="aaaa"
)

_MESSAGES = (
    Heartbeat(make_node("node-1", gpus=(24,)), (_REPORT,), draining=True, routes=RouteEpoch(3, 14)),
    Assign(7, "module:denoise", "video", "module:video", "aaaa", ("cuda:0", "cuda:1"), 24 * GIB, 3),
    Unassign(7, "its replacement is ready", 3),
    Expel("node-1", 17, "it was declared dead", may_rejoin=True),
    ManagerCounters(3, 66),
    make_workflow("video", make_need("denoise", 40, instances=2), make_need("mux", kind=DeviceKind.CPU)),
)


@pytest.mark.parametrize("message", _MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were(message: object) -> None:
    """What was sent is what arrives, kinds and states included."""
    assert decode_control(encode_control(message)) == message


def test_a_workflow_becomes_what_the_manager_keeps() -> None:
    """The needs of a drawn workflow are those of its stages' definitions, and its digest is the graph's."""
    graph = shout_backwards.graph
    registered = RegisteredWorkflow.of(graph)
    assert (registered.name, registered.digest) == ("shout_backwards", graph.digest)
    assert registered.schema_text == graph.schema_text
    needs = {need.name: need for need in registered.stages}
    assert needs["shout"] == StageNeed(shout.key, "shout", DeviceKind.GPU, 3 * GIB, 1, 2)
    assert needs["reverse"].kind is DeviceKind.CPU


@stage(resources=Gpu(memory_gib=3), inbox="device")
async def shout_from_device(ctx: StageContext[None], sound: Tensor) -> str:  # noqa: D103 - a stage of its test
    return f"{sound}"


@workflow
def shout_there(sound: Tensor) -> str:  # noqa: D103 - a workflow of its test
    return shout_from_device(sound)


def test_where_an_inbox_lies_is_kept_beside_what_a_stage_says_it_needs() -> None:
    """So that managers with inboxes of different sizes tell the same of a workflow."""
    (need,) = RegisteredWorkflow.of(shout_there.graph).stages
    assert (need.memory_bytes, need.inbox_on_device) == (3 * GIB, True)


def test_a_node_that_names_a_device_twice_is_refused() -> None:
    """A heartbeat that would let memory be counted twice does not get past the border."""
    device = make_node("node-1").devices[0]
    with pytest.raises(ValueError, match="twice"):
        evolve(make_node("node-1"), devices=(device, device))


def test_negative_sizes_are_refused() -> None:
    """A need of less than nothing does not get past the border."""
    encoded = encode_control(make_workflow("video", make_need("denoise", 1)))
    assert encoded.count(GIB.to_bytes(4, "big")) == 1
    hostile = encoded.replace(b"\x1a" + GIB.to_bytes(4, "big"), b"\x3a" + GIB.to_bytes(4, "big"))
    with pytest.raises(CodecError, match="memory_bytes"):
        decode_control(hostile)
