"""libucp on an event loop: memory that others may write to, a worker that is woken, endpoints.

A *worker* carries out what was asked of it only while it is called. It is called when its event
descriptor says so, and behind each operation that was not complete at once; nothing spins.

Whatever an operation reads must stay in place until libucp is done with it, even if its session has
ended long before: the worker, not the session, holds on to it.

UCX's own tcp is left out (``docs/explanation/decisions/ucx-wires.md`` says why), so a worker opens
no port.
"""

import asyncio
import ctypes
import enum
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_ubyte, c_void_p
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Final

import numpy as np
from attrs import frozen

from transports import _libucp as ucp
from transports._libucp import MemoryType, UcpError, UcpStarvedError
from transports.device_memory import DeviceSpan
from transports.free_descriptors import who_is_out_of_descriptors
from transports.operations import Bytes

_LOG: Final = logging.getLogger(__name__)

SETTINGS: Final = {
    "TLS": "^tcp",  # whatever the environment says; see ``without_tcp``
    # Without it an endpoint that reports a dead peer cannot use shared memory.
    "MM_ERROR_HANDLING": "y",
    # Only what is zeroed, and first what other processes can map.
    "ALLOC_PRIO": "md:sysv,md:posix,mmap",
}
_DOORBELL: Final = 1
"""The number of the only active message."""
DOORBELL_BYTES: Final = 16

_DESCRIPTORS: Final = 16
"""Must be free before libucp is called. A worker takes eleven with shared memory alone; where libucp cannot
start its own thread for want of them, it ends the process."""

_TURNS: Final = 64
_PROGRESS_PER_TURN: Final = 64
_LANES_MAX: Final = 32


class Role(enum.IntFlag):
    """What a process does with libucp; each role has a context of its own."""

    OWNER = ucp.FEATURE_AM | ucp.FEATURE_WAKEUP
    """Lends memory and hears doorbells. Without the feature RMA its workers have no handler for emulated
    writes and reads, which would go to any address that a peer names."""
    PRODUCER = ucp.FEATURE_RMA | ucp.FEATURE_AM | ucp.FEATURE_WAKEUP
    """Puts."""


@cache
def context_of(role: Role) -> int:
    """The context of a role, one for the process; made by the first worker or memory."""
    _check_descriptors()
    given = {name: value for name in SETTINGS if (value := os.environ.get(f"UCX_{name}"))}
    if wires := given.get("TLS"):
        given["TLS"] = without_tcp(wires)
        _LOG.info("UCX_TLS=%s is taken for %s: UCX's own tcp is never used here", wires, given["TLS"])
    return ucp.load().context(SETTINGS | given, role)


def without_tcp(wires: str) -> str:
    """``UCX_TLS`` less UCX's own tcp, whose emulated writes let anyone who reaches its port write anywhere.

    The variable is often set for all programs of a machine, by and for others. Where it names nothing else
    there is no wire, and sessions go on over their connections.
    """
    names = [name.strip() for name in wires.removeprefix("^").split(",")]
    others = [name for name in names if name and not fnmatchcase("tcp", name.lstrip("\\").partition(":")[0])]
    if wires.startswith("^"):
        return f"^{','.join([*others, 'tcp'])}"
    return SETTINGS["TLS"] if {"all", "*"} & set(names) else ",".join(others) or "self"


def _check_descriptors() -> None:
    starved = who_is_out_of_descriptors(_DESCRIPTORS)
    if starved:
        raise UcpStarvedError(f"{starved}, of which UCX wants {_DESCRIPTORS}: raise the limit (ulimit -n)")


class SharedMemory:
    """Zeroed memory that peers with its key may write to.

    It is given back when nobody holds a view of it any more, be it this object or a message's payload.
    """

    def __init__(self, size_bytes: int) -> None:
        library, context = ucp.load(), context_of(Role.OWNER)
        params = ucp.MemoryParams(
            field_mask=ucp.MEMORY_LENGTH | ucp.MEMORY_FLAGS, length=size_bytes, flags=ucp.MEMORY_ALLOCATE
        )
        handle = c_void_p()
        library.call("mem_map", context, byref(params), byref(handle))
        attributes = ucp.MemoryAttributes(field_mask=ucp.MEMORY_ADDRESS)
        library.call("mem_query", handle, byref(attributes))
        self.address: Final[int] = attributes.address
        self.key: Final = packed_key(library, context, handle)
        array = (c_ubyte * size_bytes).from_address(self.address)
        # Not at the interpreter's exit: views may be in use then, and the system takes it all anyway.
        weakref.finalize(array, library.function("mem_unmap"), context, handle).atexit = False
        self.view: Final = memoryview(array).cast("B")


def packed_key(library: ucp.Library, context: int, handle: c_void_p) -> bytes:
    """The key by which peers write to mapped memory."""
    buffer, length = c_void_p(), c_size_t()
    library.call("rkey_pack", context, handle, byref(buffer), byref(length))
    key = ctypes.string_at(buffer, length.value)
    library.function("rkey_buffer_release")(buffer)
    return key


@frozen
class _Pending:
    """A request that libucp has not completed."""

    request: int
    keep: object
    """What it reads; nobody else may hold it any more."""
    done: Callable[[int], None] | None


class Worker:
    """Progresses what its endpoints were asked for; belongs to one event loop.

    Args:
        role: An owner's worker hears doorbells and lives until ``close``; a producer's puts, and ends when
            nobody uses it any more.
        on_doorbell: Called with the header of each doorbell that was rung here.
    """

    def __init__(self, role: Role, on_doorbell: Callable[[bytes], None] | None = None) -> None:
        _check_descriptors()
        self._library = library = ucp.load()
        self._loop = asyncio.get_running_loop()
        params, handle, descriptor = ucp.WorkerParams(field_mask=0), c_void_p(), c_int()
        library.call("worker_create", context_of(role), byref(params), byref(handle))
        assert handle.value is not None
        self.handle: Final[int] = handle.value
        self._progress = library.function("worker_progress")
        self._arm = library.function("worker_arm")
        self._on_doorbell = on_doorbell
        self._rung: deque[bytes] = deque()
        self._failed: deque[tuple[int, int]] = deque()
        self._pending: list[_Pending] = []
        self._endpoints: dict[int, Endpoint] = {}
        self._pumping = False
        self._closed = False
        self._users = 0
        self._ending = False
        # libucp calls these from within its progress; they only take note.
        self._handlers = (ucp.ERROR_HANDLER(self._note_failure), ucp.AM_HANDLER(self._note_doorbell))
        self._listen()
        library.call("worker_get_efd", handle, byref(descriptor))
        self._descriptor = descriptor.value
        self._loop.add_reader(self._descriptor, self.pump)
        self.pump()

    def _listen(self) -> None:
        params = ucp.HandlerParams(
            field_mask=ucp.HANDLER_ID | ucp.HANDLER_CALLBACK,
            id=_DOORBELL,
            callback=ctypes.cast(self._handlers[1], c_void_p),
        )
        self._library.call("worker_set_am_recv_handler", self.handle, byref(params))

    @property
    def address(self) -> bytes:
        """By which others make endpoints to this worker; only for members of the cluster."""
        buffer, length = c_void_p(), c_size_t()
        self._library.call("worker_get_address", self.handle, byref(buffer), byref(length))
        address = ctypes.string_at(buffer, length.value)
        self._library.function("worker_release_address")(self.handle, buffer)
        return address

    def connect(self, address: bytes, on_failure: Callable[[UcpError], None]) -> "Endpoint":
        """An endpoint to the worker with this address; raises ``UcpError`` if no wire leads there."""
        place = ctypes.create_string_buffer(address, len(address))
        params = ucp.EndpointParams(
            field_mask=ucp.ENDPOINT_ADDRESS | ucp.ENDPOINT_ERROR_MODE | ucp.ENDPOINT_ERROR_HANDLER,
            address=ctypes.cast(place, c_void_p),
            error_mode=ucp.ERROR_MODE_PEER,
            error_handler=ctypes.cast(self._handlers[0], c_void_p),
        )
        handle = c_void_p()
        self._library.call("ep_create", self.handle, byref(params), byref(handle))
        assert handle.value is not None
        self._endpoints[handle.value] = endpoint = Endpoint(self, handle.value, on_failure)
        return endpoint

    def submit(
        self, call: str, *arguments: Any, keep: object = None, done: Callable[[int], None] | None = None
    ) -> bool:
        """Post an operation; True if it is complete already, else ``done`` is told its status later.

        Raises:
            UcpError: It failed at once.
        """
        request = ucp.outcome(self._library.function(call)(*arguments), call)
        if request is None:
            return True
        self._pending.append(_Pending(request, keep, done))
        return False

    def pump(self) -> None:
        """Progress what can be, tell who waits, and have the event descriptor wake us for the rest."""
        if self._pumping or self._closed:
            return
        self._pumping = True
        try:
            for _ in range(_TURNS):
                for _ in range(_PROGRESS_PER_TURN):
                    if not self._progress(self.handle):
                        break
                self._tell()
                status = self._arm(self.handle)
                if status == ucp.OK:
                    return
                if status != ucp.BUSY:
                    raise UcpError(status, "ucp_worker_arm")
        finally:
            self._pumping = False
            self._end_if_unused()
        self._loop.call_soon(self.pump)  # there is more; others come first

    def _tell(self) -> None:
        """Have the loop call who waits: none of them can keep this worker from being armed again."""
        while self._failed:
            handle, status = self._failed.popleft()
            if (endpoint := self._endpoints.get(handle)) is not None:
                endpoint.fail(UcpError(status, "the endpoint"))
        while self._rung:
            key = self._rung.popleft()
            if self._on_doorbell is not None:
                self._loop.call_soon(self._on_doorbell, key)
        pending, self._pending = self._pending, []
        for entry in pending:
            status = self._library.function("request_check_status")(entry.request)
            if status == ucp.IN_PROGRESS:
                self._pending.append(entry)
                continue
            self._library.function("request_free")(entry.request)
            if entry.done is not None:
                self._loop.call_soon(entry.done, status)

    def _note_failure(self, _: int, endpoint: int, status: int) -> None:
        self._failed.append((endpoint, status))

    def _note_doorbell(self, _: int, header: int, header_bytes: int, *__: object) -> int:
        if header_bytes == DOORBELL_BYTES:
            self._rung.append(ctypes.string_at(header, header_bytes))
        return ucp.OK

    # How it ends.

    def forget(self, endpoint: "Endpoint") -> None:
        """The endpoint is closed."""
        self._endpoints.pop(endpoint.handle, None)

    def take(self) -> None:
        """One more uses the worker."""
        self._users += 1
        self._ending = False

    def release(self) -> None:
        """One less; the last one's leaving ends the worker, once nothing is pending."""
        self._users -= 1
        self._ending = self._users == 0
        self.pump()

    def _end_if_unused(self) -> None:
        if self._ending and not self._pending:
            self.close()

    def close(self) -> None:
        """End it at once, with all endpoints."""
        assert not self._pumping, "not from within its own call"
        if not self._closed:
            self._closed = True
            if _PRODUCERS.get(self._loop) is self:
                del _PRODUCERS[self._loop]
            self._loop.remove_reader(self._descriptor)
            self._library.function("worker_destroy")(self.handle)

    @property
    def closed(self) -> bool:
        """It can do nothing more."""
        return self._closed


class Endpoint:
    """A way to another worker, and the keys to its memory."""

    def __init__(self, worker: Worker, handle: int, on_failure: Callable[[UcpError], None]) -> None:
        self.handle: Final = handle
        self._worker = worker
        self._library = ucp.load()
        self._on_failure = on_failure
        self._failure: UcpError | None = None
        self._keys: list[c_void_p] = []
        self._closed = False

    def fail(self, error: UcpError) -> None:
        """Libucp has given the peer up."""
        if self._failure is None and not self._closed:
            self._failure = error
            asyncio.get_running_loop().call_soon(self._on_failure, error)

    def unpack(self, key: bytes) -> c_void_p:
        """Take a key to memory of the peer's, for ``put``; the endpoint must be connected."""
        self._check()
        handle = c_void_p()
        self._library.call("ep_rkey_unpack", self.handle, key, byref(handle))
        self._keys.append(handle)
        return handle

    def is_mapped(self, address: int, key: c_void_p) -> bool:
        """The peer's memory at ``address`` is mapped into this process."""
        return bool(self._library.function("rkey_ptr")(key, address, byref(c_void_p())) == ucp.OK)

    def lanes(self) -> tuple[str, ...]:
        """The wires of this endpoint as ``transport/device``; none where libucp does not name them (1.13)."""
        entries = (ucp.Lane * _LANES_MAX)()
        lanes = ucp.Lanes(ctypes.addressof(entries), _LANES_MAX, ctypes.sizeof(ucp.Lane))
        attributes = ucp.EndpointAttributes(field_mask=ucp.ENDPOINT_TRANSPORTS, lanes=lanes)
        self._library.call("ep_query", self.handle, byref(attributes))
        found = entries[: attributes.lanes.count]
        return tuple(f"{lane.transport.decode()}/{lane.device.decode()}" for lane in found if lane.transport)

    def put(self, data: Bytes, address: int, key: c_void_p, done: Callable[[int], None]) -> None:
        """Write ``data`` to the peer's memory; ``done`` is told only of what is not complete at once."""
        self._check()
        array = np.frombuffer(data, np.uint8)
        place = array.ctypes.data
        self._worker.submit(
            "put_nbx", self.handle, place, len(array), address, key, _PLAIN, keep=array, done=done
        )

    def put_span(
        self, span: DeviceSpan, kind: MemoryType, address: int, key: c_void_p, done: Callable[[int], None]
    ) -> None:
        """The same of bytes on a device, whose memory is of this type."""
        self._check()
        params = byref(ucp.OperationParams(field_mask=ucp.OPERATION_MEMORY_TYPE, memory_type=kind))
        place = span.address
        with span.device.current():
            self._worker.submit(
                "put_nbx", self.handle, place, len(span), address, key, params, keep=span, done=done
            )

    def fence(self) -> None:
        """What is put from now on lands behind what was put before."""
        self._check()
        self._library.call("worker_fence", self._worker.handle)

    def flush(self, done: Callable[[int], None]) -> bool:
        """Wait for all that was put to be in the peer's memory; True if it is there already."""
        self._check()
        return self._worker.submit("ep_flush_nbx", self.handle, _PLAIN, done=done)

    def ring(self, key: bytes) -> None:
        """Ring the peer's doorbell."""
        self._check()
        self._worker.submit("am_send_nbx", self.handle, _DOORBELL, key, len(key), None, 0, _COPIED)

    def close(self) -> None:
        """Give the peer up at once; what is under way may or may not land. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._worker.forget(self)
        if self._worker.closed:
            return
        for key in self._keys:
            self._library.function("rkey_destroy")(key)
        self._worker.submit("ep_close_nbx", self.handle, _FORCED)

    def _check(self) -> None:
        # libucp may crash if an endpoint is used that has failed, and does with one that is closed.
        if self._failure is not None:
            raise self._failure
        if self._closed or self._worker.closed:
            raise UcpError(ucp.CANCELED, "an operation on a closed endpoint")


_PLAIN: Final = byref(ucp.OperationParams(field_mask=0))
_COPIED: Final = byref(ucp.OperationParams(field_mask=ucp.OPERATION_FLAGS, flags=ucp.AM_COPY_HEADER))
_FORCED: Final = byref(ucp.OperationParams(field_mask=ucp.OPERATION_FLAGS, flags=ucp.CLOSE_FORCE))

_PRODUCERS: Final[dict[asyncio.AbstractEventLoop, Worker]] = {}
"""The worker that all sessions opened on an event loop share, while there are any."""


def producers_worker() -> Worker:
    """The worker of this event loop's sessions, taken once more; ``release`` it."""
    loop = asyncio.get_running_loop()
    worker = _PRODUCERS.get(loop)
    if worker is None:
        worker = _PRODUCERS[loop] = Worker(Role.PRODUCER)
    worker.take()
    return worker
