"""Control messages: taken apart within bounds, and handed to the part that asked for them."""

import asyncio
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from onepiece.codec import CodecError, encode_control
from onepiece.messages import CONTROL_REGION, KIND_CONTROL, KIND_RESULT, Farewell, PurgeResult
from onepiece.node.control import ControlService, split_frame
from onepiece.runtime.control_queue import control_frame
from onepiece.runtime.environment import Inboxes
from transports import Address, Options, Receiver, open_sender, transport_for


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_frame_gives_back_its_messages(bodies: list[bytes]) -> None:
    """Messages that were joined to a frame come apart as they were."""
    frame = b"".join(control_frame(bodies))
    assert [bytes(body) for body in split_frame(memoryview(frame))] == bodies


@given(st.binary(max_size=400))
def test_any_bytes_split_or_are_refused(data: bytes) -> None:
    """Whatever comes, messages lie within the frame, or an error says that a length is none."""
    try:
        parts = [bytes(part) for part in split_frame(memoryview(data))]
    except CodecError:
        return
    assert sum(len(part) + 4 for part in parts) == len(data)


async def test_messages_reach_their_part_and_no_bad_one_stops_them() -> None:
    """Bad frames, unknown messages and a handler with a bug cost one message each."""
    control = ControlService(stall_seconds=1.0)
    left: list[Farewell] = []
    came = asyncio.Event()

    def on_farewell(message: Farewell) -> None:
        left.append(message)
        if message.node_id == "bug":
            raise RuntimeError("a bug in a handler")
        if message.node_id == "last":
            came.set()

    control.on(Farewell, on_farewell)
    address = Address("local", "control-test")
    async with transport_for(address).listen(address, Options()) as listener, asyncio.TaskGroup() as tasks:
        opened: asyncio.Future[Receiver] = asyncio.get_running_loop().create_future()
        serving = tasks.create_task(control.serve(Inboxes(listener), opened))
        await opened
        place = listener.address.region(CONTROL_REGION)
        async with open_sender(place, identity="a-node.1") as sender:
            bug, last = Farewell("bug", 1), Farewell("last", 1)
            await sender.send(control_frame([encode_control(bug)]), kind=KIND_CONTROL)
            await sender.send([b"\xff\xff\xff\xff"], kind=KIND_CONTROL)
            await sender.send(control_frame([b"no cbor"]), kind=KIND_CONTROL)
            await sender.send(control_frame([encode_control(bug)]), kind=KIND_RESULT)
            unwanted = encode_control(PurgeResult(1, "local://nowhere/control", "uid"))
            await sender.send(control_frame([unwanted, encode_control(last)]), kind=KIND_CONTROL)
            await came.wait()
        serving.cancel()
    assert [message.node_id for message in left] == ["bug", "last"]


def test_several_parts_may_ask_for_one_kind() -> None:
    """Each is called, in the order in which they asked; one that fails costs the others nothing."""
    control = ControlService(stall_seconds=1.0)
    seen: list[tuple[str, str]] = []

    def part(name: str) -> Callable[[Farewell], None]:
        def on_farewell(message: Farewell) -> None:
            seen.append((name, message.node_id))
            if name == "bug":
                raise RuntimeError("a bug in a handler")

        return on_farewell

    for name in ("first", "bug", "last"):
        control.on(Farewell, part(name))
    control.on(PurgeResult, lambda message: seen.append(("other", message.uid)))
    control.dispatch(Farewell("a-node", 1))
    control.dispatch(Farewell("b-node", 1))
    assert seen == [(name, node) for node in ("a-node", "b-node") for name in ("first", "bug", "last")]
