"""CUDA devices over a driver that is faked at its C interface; no device takes part."""

import asyncio
import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.transports.fake_cuda import PROTOTYPES, FakeDriver, assert_given_back, types_of
from transports import _libcuda, cuda
from transports.address import Address
from transports.channel import open_receiver, open_sender
from transports.cuda import CudaDevice, device_named, span_of
from transports.device_frees import frees
from transports.device_memory import DeviceError
from transports.errors import DeviceUnreachable
from transports.inbox_memory import memory_for
from transports.local import LocalTransport
from transports.memory import Options
from transports.ring import Geometry
from transports.testing import DEVICE_CHECKS, Check, Setting, until
from transports.testing.setting import raised

_NAMES = count()


def _library(driver: FakeDriver) -> _libcuda.Library:
    library = _libcuda.Library(driver)
    library.call("cuInit", 0)
    return library


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A driver, loaded as if it were the machine's."""
    fake = FakeDriver()
    library = _library(fake)
    monkeypatch.setattr(_libcuda, "load", lambda: library)
    cuda._DEVICES.clear()
    yield fake
    cuda._DEVICES.clear()
    gc.collect()


def _kind(argument: Any) -> tuple[object, ...]:
    """What counts on the wire of a C call: pointer, or length and sign."""
    if argument in {ctypes.c_void_p, ctypes.c_char_p}:
        return ("pointer",)
    return ctypes.sizeof(argument), argument(-1).value < 0


def test_signatures_are_the_drivers() -> None:
    """Each function that is called has the arguments of its prototype, and none is called that has none."""
    prototypes = dict(types_of(line) for line in PROTOTYPES.strip().splitlines())
    assert _libcuda.SIGNATURES.keys() == prototypes.keys()
    for name, types in prototypes.items():
        assert [*map(_kind, _libcuda.SIGNATURES[name])] == [*map(_kind, types)], name


@pytest.mark.parametrize("check", DEVICE_CHECKS, ids=lambda check: check.__name__)
async def test_device_inboxes(check: Check, driver: FakeDriver) -> None:
    """What the check's docstring says holds with memory of a CUDA device, as the driver gives it."""
    address = Address.parse(f"local://cuda-{next(_NAMES)}")
    await check(Setting(LocalTransport(), address, device=cuda.cuda_device(0)))
    assert_given_back(driver)
    assert driver.stack == [], "the thread has the context that it had"
    assert {*driver.flushes} <= {(0, 100)}


def test_other_libraries_act_on_the_device(driver: FakeDriver) -> None:
    """Within ``current`` a thread has the device's context, and then that of before, also after errors."""
    first, second = cuda.cuda_device(0), cuda.cuda_device(1)
    with first.current():
        before = list(driver.stack)
        with suppress(KeyError), second.current():
            assert driver.stack[:-1] == before
            assert driver.stack[-1] != before[-1]
            raise KeyError
        assert driver.stack == before
    assert driver.stack == []
    assert first.kind == "cuda"


async def test_an_inbox_by_name(driver: FakeDriver) -> None:
    """``memory="cuda:1"`` puts the ring, whole pages of it, on that device, zeroed and synchronous."""
    transport, address = LocalTransport(), Address.parse(f"local://cuda-{next(_NAMES)}")
    geometry = Geometry(4, 1 << 14, 4, head_bytes=64)
    async with (
        transport.listen(address, Options()) as listener,
        open_receiver(listener, "inbox", geometry, memory="cuda:1") as receiver,
    ):
        assert receiver.device is cuda.cuda_device(1)
        ((where, memory),) = driver.memory.items()
        assert (driver.owner[where], len(memory), any(memory)) == (1, 2 << 20, False)
        assert where in driver.sync_memops
    del receiver
    await asyncio.sleep(0)  # the loop lets go of what was awaited last
    assert_given_back(driver)


async def test_no_device_and_no_memory_are_told(driver: FakeDriver) -> None:
    """What is missing is named: the device, or the memory, with the driver's word for it."""
    transport, address = LocalTransport(), Address.parse(f"local://cuda-{next(_NAMES)}")
    async with transport.listen(address, Options()) as listener:
        for name, payload_bytes, what in (
            ("cuda:2", 1 << 14, r"no inbox in the memory of cuda:2.*sees 2 CUDA devices"),
            ("cuda:0", 1 << 30, r"cuMemAlloc_v2 failed with CUDA_ERROR_OUT_OF_MEMORY \(2\): out of memory"),
        ):
            geometry = Geometry(4, payload_bytes, 4, head_bytes=64)
            with pytest.raises(DeviceUnreachable, match=what):
                async with open_receiver(listener, "inbox", geometry, memory=name):
                    raise AssertionError("it was opened")
    assert_given_back(driver)


async def test_what_a_device_that_failed_cannot_take_is_not_tried_again(driver: FakeDriver) -> None:
    """Another session would fail the same way: the sender is told the driver's reason at once."""
    transport, address = LocalTransport(), Address.parse(f"local://cuda-{next(_NAMES)}")
    geometry = Geometry(4, 1 << 14, 4, head_bytes=64)
    async with (
        transport.listen(address, Options()) as listener,
        open_receiver(listener, "inbox", geometry, memory="cuda:0") as receiver,
        open_sender(receiver.address, "a", transport=transport) as sender,
    ):
        driver.fails = {"cuMemcpyHtoDAsync_v2": 201}
        told = await raised(DeviceUnreachable, sender.send(b"tensor"))
        assert "cuda:0 failed as bytes were put into" in str(told)
        assert "cuMemcpyHtoDAsync_v2 failed with CUDA_ERROR_INVALID_CONTEXT" in str(told)
        driver.fails = {}


class Held(FakeDriver):
    """A driver one of whose functions does not return before it is let go."""

    def __init__(self, name: str) -> None:
        self.held = name
        self.is_called, self.goes_on = threading.Event(), threading.Event()
        super().__init__(memory_bytes=4 << 20)

    def _checked(self, name: str, body: Callable[..., int]) -> Callable[..., int]:
        checked = super()._checked(name, body)

        def call(*arguments: Any) -> int:
            if name == self.held:
                self.is_called.set()
                self.goes_on.wait()
            return checked(*arguments)

        return call


async def test_a_device_that_begins_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a context takes seconds: what else runs on the event loop goes on meanwhile."""
    driver = Held("cuDevicePrimaryCtxRetain")
    library = _library(driver)
    monkeypatch.setattr(_libcuda, "load", lambda: library)
    cuda._DEVICES.clear()
    geometry = Geometry(4, 1 << 14, 4, head_bytes=64)
    opening = asyncio.ensure_future(memory_for("cuda:0", geometry))
    await until(driver.is_called.is_set, "the driver is asked")
    driver.goes_on.set()
    memory = await opening
    assert memory is not None
    del memory, opening
    await asyncio.sleep(0)  # the loop lets go of what was awaited last
    cuda._DEVICES.clear()
    assert_given_back(driver)


def test_who_lets_go_of_memory_does_not_wait() -> None:
    """The driver frees it when the device is done with its work; who needs the room then waits for that."""
    driver = Held("cuMemFree_v2")
    device = CudaDevice(_library(driver), 0)
    memory = device.allocate(3 << 20)
    del memory
    gc.collect()
    driver.is_called.wait()
    assert driver.memory, "this thread goes on, and the memory is not yet free"
    with ThreadPoolExecutor(1) as threads:
        next_one = threads.submit(device.allocate, 3 << 20)
        driver.goes_on.set()
        next_one.result()
    del next_one
    assert_given_back(driver)


def test_memory_that_cannot_be_freed_is_told(driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    """Where the driver refuses, that is logged; the next one is freed all the same."""
    device = cuda.cuda_device(0)
    memory = device.allocate(64)
    driver.fails = {"cuMemFree_v2": 201}
    del memory
    gc.collect()
    frees().wait()
    assert "memory cannot be given back: cuda:0: cuMemFree_v2 failed" in caplog.text
    driver.fails = {}
    driver.memory.clear()
    device.allocate(64)
    assert_given_back(driver)


def test_a_graph_that_somebody_records_is_left_alone(driver: FakeDriver) -> None:
    """Memory is taken and given back beside it without spoiling it."""
    device = cuda.cuda_device(0)
    driver.is_recording = True
    device.allocate(64)
    assert_given_back(driver)
    assert driver.spoilt == 0


def test_who_waits_for_a_device_waits_for_graphs_too(driver: FakeDriver) -> None:
    """The driver refuses to wait for a context in which a graph is recorded; so that comes first."""
    device = cuda.cuda_device(0)
    driver.is_recording = True
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(device.wait, None)
        while not driver.spoilt:
            time.sleep(0)
        assert not waiting.done()
        driver.is_recording = False
        waiting.result()


def test_graphs_are_not_waited_for_without_end(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is never finished is an error, which says what is going on."""
    monkeypatch.setattr(cuda, "_RECORDING_SECONDS", 0.0)
    device = cuda.cuda_device(0)
    driver.is_recording = True
    with pytest.raises(
        DeviceError, match="cuCtxSynchronize failed with CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    ):
        device.wait(None)


def test_memory_is_not_lost_when_it_cannot_be_made_ready(driver: FakeDriver) -> None:
    """What was taken and cannot be zeroed is given back before the error is raised."""
    device = device_named("cuda:0")
    for call in ("cuMemsetD8Async", "cuPointerSetAttribute"):
        driver.fails = {call: 1}
        with pytest.raises(DeviceError, match=f"{call} failed with CUDA_ERROR_INVALID_VALUE"):
            device.allocate(100)
        assert_given_back(driver)
        assert driver.stack == []


@pytest.mark.parametrize(
    ("ordering", "options", "flushes", "is_known"),
    [(0, 1, True, True), (100, 1, False, True), (200, 0, False, True), (0, 2, False, False)],
)
def test_writes_of_adapters_are_flushed_where_needed(
    ordering: int, options: int, flushes: bool, is_known: bool
) -> None:
    """A device that orders them itself is not asked; one that can neither is for no adapter."""
    driver = FakeDriver({118: ordering, 117: options})
    device = CudaDevice(_library(driver), 0)
    memory = device.allocate(64)
    memory.peek(0, 8)
    assert driver.flushes == ([(0, 100)] * 2 if flushes else [])
    if is_known:
        device.check_remote_writes()
    else:
        with pytest.raises(DeviceError, match=r"WRITES_ORDERING and FLUSH_WRITES_OPTIONS are 0"):
            device.check_remote_writes()


def test_what_the_driver_says_of_its_devices(driver: FakeDriver) -> None:
    """Models and abilities can be had without a context on a device."""
    driver.fails = {"cuDevicePrimaryCtxRetain": 1}
    first, second = cuda.gpus()
    assert (first.model, second.model, second.ordinal) == ("Fake 0", "Fake 1", 1)
    assert (first.takes_peers, first.exports_dmabuf) == (True, True)
    assert (first.orders_writes, first.flushes_writes) == (False, True)


def test_a_dmabuf_is_of_whole_pages() -> None:
    """The descriptor is of the memory from its beginning, in whole pages, and belongs to the caller."""
    driver = FakeDriver()
    device = CudaDevice(_library(driver), 0)
    memory = device.allocate(5000)
    descriptor = device.dmabuf(memory.address, memory.size_bytes)
    os.close(descriptor)
    assert driver.exported == [(memory.address, 2 << 20)]


def test_what_keeps_adapters_away_is_named(tmp_path: Path) -> None:
    """Each attribute and module that is missing is named with what would bring it."""
    module = tmp_path / "nvidia_peermem"
    without = CudaDevice(_library(FakeDriver({})), 0, module)
    with pytest.raises(DeviceError, match=r"DMA_BUF_SUPPORTED is 0.*open kernel modules"):
        without.dmabuf(0, 4096)
    with pytest.raises(DeviceError, match="GPU_DIRECT_RDMA_SUPPORTED is 0"):
        without.check_peer_access()
    device = CudaDevice(_library(FakeDriver()), 0, module)
    with pytest.raises(DeviceError, match="modprobe nvidia_peermem"):
        device.check_peer_access()
    module.mkdir()
    device.check_peer_access()


def test_old_drivers_are_told() -> None:
    """A function that the driver lacks is named when it is needed, and not before."""
    driver = FakeDriver(without=("cuFlushGPUDirectRDMAWrites",))
    device = CudaDevice(_library(driver), 0)
    memory = device.allocate(64)
    with pytest.raises(DeviceError, match=r"no cuFlushGPUDirectRDMAWrites.*too old"):
        memory.peek(0, 8)
    assert driver.stack == []


def test_attributes_that_an_old_driver_does_not_know(tmp_path: Path) -> None:
    """What it is asked for and has not heard of, its device has not: the other way to adapters is left."""
    device = CudaDevice(_library(FakeDriver(newest_attribute=118)), 0, tmp_path)
    assert (device.gpu.takes_peers, device.gpu.exports_dmabuf) == (True, False)
    device.check_peer_access()
    driver = FakeDriver()
    library = _library(driver)
    driver.fails = {"cuDeviceGetAttribute": 3}
    with pytest.raises(DeviceError, match="cuDeviceGetAttribute failed with CUDA_ERROR_NOT_INITIALIZED"):
        CudaDevice(library, 0)


def test_a_device_is_one_in_all_threads(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that ask for a device while another one still opens it get the same: bytes go between them."""
    is_opening, goes_on = threading.Event(), threading.Event()

    class Slow(CudaDevice):
        def __init__(self, library: _libcuda.Library, ordinal: int) -> None:
            is_opening.set()
            goes_on.wait()
            super().__init__(library, ordinal)

    monkeypatch.setattr(cuda, "CudaDevice", Slow)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(cuda.cuda_device, 0)
        is_opening.wait()
        others = [threads.submit(cuda.cuda_device, 0) for _ in range(2)]
        goes_on.set()
        assert [each.result() is first.result() for each in others] == [True, True]


def test_the_first_error_is_told(driver: FakeDriver) -> None:
    """Where a device has failed nothing can be given back to it either; that is not what is said."""
    device = device_named("cuda:0")
    driver.fails = {"cuMemsetD8Async": 2, "cuMemFree_v2": 201}
    with pytest.raises(DeviceError, match="cuMemsetD8Async failed with CUDA_ERROR_OUT_OF_MEMORY"):
        device.allocate(100)


def test_errors_name_their_device(driver: FakeDriver) -> None:
    """Which of them it was is said once; and, if so, that nothing but a new process helps."""
    first, second = cuda.cuda_device(0), cuda.cuda_device(1)
    driver.fails = {"cuCtxSynchronize": 700}
    with pytest.raises(DeviceError) as caught, first.current():
        second.wait(None)
    assert str(caught.value) == (
        "cuda:1: cuCtxSynchronize failed with CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was"
        " encountered; this process can use CUDA no more: restart it"
    )


def test_errors_that_the_driver_does_not_know() -> None:
    """A number without a name is shown as it is."""
    driver = FakeDriver()
    library = _library(driver)
    driver.fails = {"cuDeviceGetCount": 4711}
    with pytest.raises(DeviceError, match=r"cuDeviceGetCount failed with an error .* \(4711\)"):
        CudaDevice(library, 0)


def test_without_a_driver() -> None:
    """A machine without one is told so, and what a container lacks."""
    if _has_driver():
        pytest.skip("this machine has an NVIDIA driver")
    _libcuda.load.cache_clear()
    with pytest.raises(DeviceError, match=r"no NVIDIA driver.*--gpus all"):
        device_named("cuda:0")


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class _Array:
    """What a library's array tells of itself."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str, **more: object) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": typestr,
            "version": 3,
            **more,
        }


async def test_arrays_are_spans_of_their_device(driver: FakeDriver) -> None:
    """Address, length and device of an array are taken as they are, and the array is kept for as long."""
    other = cuda.cuda_device(1)
    memory = other.allocate(4096)
    array = _Array(memory.address + 64, (2, 3, 5), "<f2", strides=(30, 10, 2))
    span = await span_of(array)
    assert (span.device, span.address, len(span)) == (other, memory.address + 64, 60)
    assert span._keep is array
    interface = span[10:30].__cuda_array_interface__
    assert interface["data"] == (memory.address + 74, False)
    assert (interface["shape"], interface["typestr"], interface["stream"]) == ((20,), "|u1", None)


@pytest.mark.parametrize(
    ("told", "given", "waited"),
    [({}, None, None), ({"stream": 1}, None, 1), ({"stream": None}, None, None), ({"stream": 2}, None, None)],
)
async def test_what_computes_an_array_is_waited_for(
    driver: FakeDriver, told: dict[str, int | None], given: int | None, waited: int | None
) -> None:
    """The stream that the array names, or everything, since that of a thread means another one elsewhere."""
    memory = cuda.cuda_device(0).allocate(64)
    driver.synchronised.clear()
    await span_of(_Array(memory.address, (64,), "|u1", **told), stream=given)
    assert driver.synchronised == [waited]


async def test_the_stream_that_is_given_is_waited_for(driver: FakeDriver) -> None:
    """The caller's word goes before the array's; 0 is the default stream."""
    device = cuda.cuda_device(0)
    memory = device.allocate(64)
    for stream in (0, 1):
        driver.synchronised.clear()
        await span_of(_Array(memory.address, (64,), "|u1", stream=2), stream=stream)
        assert driver.synchronised == [stream]
    with pytest.raises(DeviceError, match="cuStreamSynchronize failed with CUDA_ERROR_INVALID_HANDLE"):
        await span_of(_Array(memory.address, (64,), "|u1"), stream=0x999)


@pytest.mark.parametrize(
    ("shape", "typestr", "strides", "what"),
    [
        ((4, 4), "<f4", (4, 16), "not contiguous"),
        ((4, 4), "<f4", (32, 4), "not contiguous"),
        ((0, 4), "<f4", None, "lies on no device"),
        ((4,), "|O", None, "no plain elements"),
        ((4,), "<U4", None, "no plain elements"),
        ((4,), "|t4", None, "no plain elements"),
    ],
)
async def test_arrays_that_cannot_be_sent(
    driver: FakeDriver, shape: tuple[int, ...], typestr: str, strides: tuple[int, ...] | None, what: str
) -> None:
    """What is not one piece of plain bytes is refused, and what to do instead is said."""
    memory = cuda.cuda_device(0).allocate(64)
    with pytest.raises(ValueError, match=what):
        await span_of(_Array(memory.address, shape, typestr, strides=strides))
    with pytest.raises(ValueError, match="bytes is no array on a CUDA device"):
        await span_of(b"host")
    with pytest.raises(ValueError, match="a masked array is two"):
        await span_of(_Array(memory.address, (4,), "<f4", mask=object()))


async def test_tensors_that_the_interface_does_not_know(driver: FakeDriver) -> None:
    """Torch has no word in it for eight-bit floats, and none for tensors with gradients: say what to do."""

    class Eighth:
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise KeyError("torch.float8_e4m3fn")

    with pytest.raises(ValueError, match=r"Eighth does not say .*float8_e4m3fn.*view\(torch.uint8\)"):
        await span_of(Eighth())


async def test_dimensions_of_one_have_any_stride(driver: FakeDriver) -> None:
    """An extent of one leaves its stride without meaning."""
    memory = cuda.cuda_device(0).allocate(64)
    span = await span_of(_Array(memory.address, (1, 4, 1), "<f4", strides=(999, 4, 7)))
    assert len(span) == 16
