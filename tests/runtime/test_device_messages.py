"""Stage inputs into inboxes on a device: how they are laid out, and what is sent where none is reached."""

import random
import struct
from collections.abc import Iterator
from itertools import count
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

from onepiece.codec import pack, unpack
from onepiece.errors import CodecError, StageFailed
from onepiece.limits import HEADER_BYTES_MAX
from onepiece.messages import KIND_STAGE_INPUT, StageInput, with_attempt
from onepiece.runtime.device_messages import DeviceWay, copied_to_host, for_device, from_device, in_host
from tests.runtime.pretended_gpu import CountingDriver, pretended_gpu
from transports import Address, DeviceError, DeviceSpan, Geometry, Options, cuda, open_receiver, open_sender
from transports.local import LocalTransport
from transports.operations import Content
from transports.testing import FakeDevice

HEADER: Final = StageInput("u", "w", "b", "a", "owner", 0.0, None, 0.0)
_HOUSES = count()


@pytest.fixture
def driver() -> Iterator[CountingDriver]:
    """The GPU's driver."""
    with pretended_gpu() as pretended:
        yield pretended


def _values(text_bytes: int) -> dict[str, Any]:
    return {
        "data": bytes(range(256)) * 20,
        "odd": bytes(4097),
        "none": None,
        "texts": ["x" * 1000] * (text_bytes // 1000),
    }


def _on(device: FakeDevice, parts: list[Content]) -> DeviceSpan:
    """The payload where it would arrive."""
    data = b"".join(copied_to_host(parts))
    memory = device.allocate(max(1, len(data)))
    memory.put(0, (data,))
    return memory.span(0, len(data))


def _cut_anywhere(parts: list[Content], rng: random.Random) -> list[Content]:
    """The same bytes in other pieces, as a disk gives them back; the first eight are together."""
    data = b"".join(copied_to_host(parts))
    cuts = sorted(rng.sample(range(8, len(data)), 9))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.mark.parametrize("text_bytes", [0, 20_000], ids=["short head", "long head"])
@pytest.mark.parametrize("seed", range(5))
def test_messages_come_out_as_they_went_in(seed: int, text_bytes: int) -> None:
    """However they are cut, whether the head fits or not; with the attempt, and what was lost."""
    device = FakeDevice()
    packed = pack(HEADER, _values(text_bytes))
    parts = _cut_anywhere(list(packed.parts), random.Random(seed)) if seed else list(packed.parts)
    head, payload = for_device(with_attempt(parts, 7, was_lost=seed % 2 == 0), 4096)
    assert len(head) <= 4096
    message, attempt, was_lost = from_device(head, _on(device, payload))
    assert (attempt, was_lost) == (7, seed % 2 == 0)
    assert len(message) == packed.length
    assert bytes(message.to_host()) == b"".join(packed.parts)
    assert not message.to_host().readonly, "a tensor is made of it without another copy"
    unpacked = unpack(message, StageInput)
    assert unpacked.header == HEADER
    assert not isinstance(unpacked.values["data"].buffer, memoryview), "it lies on the device"
    assert unpacked.values["data"].buffer.to_host() == bytes(range(256)) * 20
    assert unpacked.values["texts"] == ["x" * 1000] * (text_bytes // 1000)


def test_a_message_without_buffers_has_no_payload() -> None:
    """Plain values alone travel in the head."""
    head, payload = for_device(with_attempt(pack(HEADER, {"n": 1}).parts, 1), 4096)
    assert payload == []
    message, _, _ = from_device(head, _on(FakeDevice(), payload))
    assert unpack(message, StageInput).values == {"n": 1}


def test_heads_that_are_none_are_refused() -> None:
    """Whatever stands there, it is a ``CodecError``, and nothing large is copied for it."""
    device = FakeDevice()
    message = pack(HEADER, {"data": bytes(5000)})
    head, payload = for_device(with_attempt(message.parts, 1), 4096)
    span = _on(device, payload)
    fixed = bytes(8) + struct.pack("<I4x", HEADER_BYTES_MAX + 9)
    large = device.allocate(2 * HEADER_BYTES_MAX).span(0, 2 * HEADER_BYTES_MAX)
    for wrong, where in (
        (b"", span),
        (head[:15], span),
        (fixed, large),
        (head[:8] + struct.pack("<I4x", 64) + head[16:], span),
        (head[:8] + struct.pack("<I4x", len(span) + 1), span),
        (head[:8] + struct.pack("<I4x", 64), span),
        (head[:-1], span),
        (head + b"\0", span),
        (head, span[:-1]),
        (head, span[:0]),
    ):
        with pytest.raises(CodecError):
            unpack(from_device(wrong, where)[0], StageInput)


async def test_what_lies_on_a_device_that_failed_is_lost() -> None:
    """The error says so, by a name that ends the request alone."""
    device = FakeDevice("cuda:0")
    span = device.allocate(64).span(0, 64)

    def broken(address: int, length: int) -> bytes:
        raise DeviceError("cuda:0 has fallen off the bus")

    device.read = broken  # type: ignore[method-assign]  # what is tested
    with pytest.raises(StageFailed, match=r"cuda:0 is lost .*fallen off the bus"):
        await in_host([b"head", span])


@pytest.mark.parametrize("memory", ["host", "cuda:1"])
async def test_where_a_device_is_not_reached_copies_are_sent(memory: str, driver: CountingDriver) -> None:
    """Into the host's memory as a matter of course; into another device's with one word in the log."""
    address = Address.parse(f"local://device-way-{next(_HOUSES)}")
    geometry = Geometry(8, 1 << 16, 4, head_bytes=0 if memory == "host" else 4096)
    transport = LocalTransport()
    span = cuda.cuda_device(0).allocate(5000).span(0, 5000)
    span.device.write(span.address, bytes(range(250)) * 20)
    message = list(pack(HEADER, {"data": bytes(3000)}).parts)
    async with (
        transport.listen(address, Options()) as listener,
        open_receiver(listener, "inbox", geometry, memory=memory) as receiver,
        open_sender(receiver.address, "a", transport=transport) as sender,
    ):
        way = DeviceWay(str(receiver.address))
        with capture_logs() as logs:
            for attempt in (1, 2):
                parts = with_attempt([*message, span], attempt)
                await way.send(sender, parts, KIND_STAGE_INPUT)
                delivery = await receiver.receive()
                if delivery.on_device is None:
                    assert bytes(delivery.payload) == b"".join(copied_to_host(parts))
                else:
                    assert delivery.on_device.to_host()[-5000:] == span.to_host()
                receiver.release(delivery)
        told = [each["event"] for each in logs]
        assert told == ([] if memory == "host" else ["device_bytes_through_host"])
