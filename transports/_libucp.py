"""The C interface of libucp, called through ctypes: the only file that knows its structures.

The library is looked for in this order, and loaded by the first call of ``load``:

1. the path in the environment variable ``ONEPIECE_LIBUCP``, and then nowhere else;
2. the package ``libucx`` (the extra ``ucx``), which has neither InfiniBand nor RoCE;
3. ``libucp.so.0`` of the system.

Only fields that libucp has had since 1.13 are declared; each structure begins with a mask that says
which of its fields are set, so longer structures of later versions do not matter.
"""

import ctypes
import os
from collections.abc import Callable
from ctypes import (
    POINTER,
    Structure,
    c_byte,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

LIBRARY_VARIABLE: Final = "ONEPIECE_LIBUCP"

_API: Final = (1, 13)
"""The version of the interface that is asked for; libucp refuses if it is older."""

# Features, fields and flags, as ucp.h numbers them.
FEATURE_RMA: Final = 1 << 1
FEATURE_WAKEUP: Final = 1 << 4
FEATURE_AM: Final = 1 << 6
CONTEXT_FEATURES: Final = 1 << 0
CONTEXT_SHARED: Final = 1 << 5
WORKER_THREAD_MODE: Final = 1 << 0
ENDPOINT_ADDRESS: Final = 1 << 0
ENDPOINT_ERROR_MODE: Final = 1 << 1
ENDPOINT_ERROR_HANDLER: Final = 1 << 2
ENDPOINT_TRANSPORTS: Final = 1 << 3
ERROR_MODE_PEER: Final = 1
MEMORY_ADDRESS: Final = 1 << 0
MEMORY_LENGTH: Final = 1 << 1
MEMORY_FLAGS: Final = 1 << 2
MEMORY_ALLOCATE: Final = 1 << 1
HANDLER_ID: Final = 1 << 0
HANDLER_CALLBACK: Final = 1 << 2
OPERATION_FLAGS: Final = 1 << 4
CLOSE_FORCE: Final = 1 << 0
AM_COPY_HEADER: Final = 1 << 3

OK: Final = 0
NO_RESOURCE: Final = -2
IN_PROGRESS: Final = 1
BUSY: Final = -15
CANCELED: Final = -16
_STATUS_LAST: Final = -100
_POINTERS: Final = 1 << 64

_STATUS_NAMES: Final = {
    -1: "NO_MESSAGE", -2: "NO_RESOURCE", -3: "IO_ERROR", -4: "NO_MEMORY", -5: "INVALID_PARAM",
    -6: "UNREACHABLE", -7: "INVALID_ADDR", -8: "NOT_IMPLEMENTED", -12: "NO_ELEM", -14: "NO_DEVICE",
    -15: "BUSY", -16: "CANCELED", -17: "SHMEM_SEGMENT", -19: "OUT_OF_RANGE", -20: "TIMED_OUT",
    -21: "EXCEEDS_LIMIT", -22: "UNSUPPORTED", -23: "REJECTED", -24: "NOT_CONNECTED",
    -25: "CONNECTION_RESET", -80: "ENDPOINT_TIMEOUT",
}  # fmt: skip


class UcpError(Exception):
    """A call of libucp failed; the message names the call and the status."""

    def __init__(self, status: int, call: str) -> None:
        super().__init__(f"{call} failed with {_STATUS_NAMES.get(status, 'status')} ({status})")
        self.status = status


class UcpStarvedError(UcpError):
    """Libucp was not called: this process has too few file descriptors for it; the message says so."""

    def __init__(self, why: str) -> None:
        Exception.__init__(self, why)
        self.status = NO_RESOURCE


class UcpMissingError(Exception):
    """There is no libucp, or none that can be used; the message says what to install."""


class ContextParams(Structure):
    """``ucp_params_t``."""

    _fields_ = [
        ("field_mask", c_uint64), ("features", c_uint64), ("request_size", c_size_t),
        ("request_init", c_void_p), ("request_cleanup", c_void_p), ("tag_sender_mask", c_uint64),
        ("mt_workers_shared", c_int), ("estimated_num_eps", c_size_t), ("estimated_num_ppn", c_size_t),
        ("name", c_char_p),
    ]  # fmt: skip


class WorkerParams(Structure):
    """``ucp_worker_params_t``."""

    _fields_ = [
        ("field_mask", c_uint64), ("thread_mode", c_int), ("cpu_mask", c_uint64 * 16), ("events", c_uint),
        ("user_data", c_void_p), ("event_fd", c_int), ("flags", c_uint64), ("name", c_char_p),
        ("am_alignment", c_size_t), ("client_id", c_uint64),
    ]  # fmt: skip


class SocketAddress(Structure):
    """``ucs_sock_addr_t``."""

    _fields_ = [("address", c_void_p), ("length", c_uint32)]


class EndpointParams(Structure):
    """``ucp_ep_params_t``."""

    _fields_ = [
        ("field_mask", c_uint64), ("address", c_void_p), ("error_mode", c_int), ("error_handler", c_void_p),
        ("error_argument", c_void_p), ("user_data", c_void_p), ("flags", c_uint),
        ("socket_address", SocketAddress), ("connection_request", c_void_p), ("name", c_char_p),
        ("local_socket_address", SocketAddress),
    ]  # fmt: skip


class Lane(Structure):
    """``ucp_transport_entry_t``: one wire of an endpoint."""

    _fields_ = [("transport", c_char_p), ("device", c_char_p)]


class Lanes(Structure):
    """``ucp_transports_t``."""

    _fields_ = [("entries", c_void_p), ("count", c_uint), ("entry_bytes", c_size_t)]


class EndpointAttributes(Structure):
    """``ucp_ep_attr_t``."""

    _fields_ = [
        ("field_mask", c_uint64), ("name", c_ubyte * 32), ("local", c_ubyte * 128), ("remote", c_ubyte * 128),
        ("lanes", Lanes), ("user_data", c_void_p),
    ]  # fmt: skip


class MemoryParams(Structure):
    """``ucp_mem_map_params_t``."""

    _fields_ = [
        ("field_mask", c_uint64), ("address", c_void_p), ("length", c_size_t), ("flags", c_uint),
        ("protection", c_uint), ("memory_type", c_int), ("exported", c_void_p),
    ]  # fmt: skip


class MemoryAttributes(Structure):
    """``ucp_mem_attr_t``."""

    _fields_ = [
        ("field_mask", c_uint64), ("address", c_void_p), ("length", c_size_t), ("memory_type", c_int),
    ]  # fmt: skip


class OperationParams(Structure):
    """``ucp_request_param_t``."""

    _fields_ = [
        ("field_mask", c_uint32), ("flags", c_uint32), ("request", c_void_p), ("callback", c_void_p),
        ("datatype", c_uint64), ("user_data", c_void_p), ("reply_buffer", c_void_p), ("memory_type", c_int),
        ("receive_info", c_void_p), ("memory", c_void_p),
    ]  # fmt: skip


class HandlerParams(Structure):
    """``ucp_am_handler_param_t``."""

    _fields_ = [
        ("field_mask", c_uint64), ("id", c_uint), ("flags", c_uint32), ("callback", c_void_p),
        ("argument", c_void_p),
    ]  # fmt: skip


_STATUS: Final = c_byte
"""``ucs_status_t`` is an enumeration of one byte; what stands above it in a register is anything."""

ERROR_HANDLER: Final = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, _STATUS)
"""(argument, endpoint, status); no exception may leave it, and it must not call libucp."""
AM_HANDLER: Final = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p)
"""(argument, header, header bytes, data, bytes, parameters) -> status; the same rules."""

_REFERENCE: Final = c_void_p
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "ucp_get_version": (None, (POINTER(c_uint), POINTER(c_uint), POINTER(c_uint))),
    "ucp_config_read": (_STATUS, (c_char_p, c_char_p, _REFERENCE)),
    "ucp_config_modify": (_STATUS, (c_void_p, c_char_p, c_char_p)),
    "ucp_config_release": (None, (c_void_p,)),
    "ucp_init_version": (_STATUS, (c_uint, c_uint, _REFERENCE, c_void_p, _REFERENCE)),
    "ucp_worker_create": (_STATUS, (c_void_p, _REFERENCE, _REFERENCE)),
    "ucp_worker_destroy": (None, (c_void_p,)),
    "ucp_worker_progress": (c_uint, (c_void_p,)),
    "ucp_worker_get_efd": (_STATUS, (c_void_p, _REFERENCE)),
    "ucp_worker_arm": (_STATUS, (c_void_p,)),
    "ucp_worker_fence": (_STATUS, (c_void_p,)),
    "ucp_worker_get_address": (_STATUS, (c_void_p, _REFERENCE, _REFERENCE)),
    "ucp_worker_release_address": (None, (c_void_p, c_void_p)),
    "ucp_worker_set_am_recv_handler": (_STATUS, (c_void_p, _REFERENCE)),
    "ucp_ep_create": (_STATUS, (c_void_p, _REFERENCE, _REFERENCE)),
    "ucp_ep_close_nbx": (c_void_p, (c_void_p, _REFERENCE)),
    "ucp_ep_flush_nbx": (c_void_p, (c_void_p, _REFERENCE)),
    "ucp_ep_query": (_STATUS, (c_void_p, _REFERENCE)),
    "ucp_ep_rkey_unpack": (_STATUS, (c_void_p, c_char_p, _REFERENCE)),
    "ucp_rkey_ptr": (_STATUS, (c_void_p, c_uint64, _REFERENCE)),
    "ucp_rkey_destroy": (None, (c_void_p,)),
    "ucp_mem_map": (_STATUS, (c_void_p, _REFERENCE, _REFERENCE)),
    "ucp_mem_query": (_STATUS, (c_void_p, _REFERENCE)),
    "ucp_mem_unmap": (_STATUS, (c_void_p, c_void_p)),
    "ucp_rkey_pack": (_STATUS, (c_void_p, c_void_p, _REFERENCE, _REFERENCE)),
    "ucp_rkey_buffer_release": (None, (c_void_p,)),
    "ucp_put_nbx": (c_void_p, (c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, _REFERENCE)),
    "ucp_am_send_nbx": (c_void_p, (c_void_p, c_uint, c_char_p, c_size_t, c_void_p, c_size_t, _REFERENCE)),
    "ucp_request_check_status": (_STATUS, (c_void_p,)),
    "ucp_request_free": (None, (c_void_p,)),
}


class Library:
    """The functions of one libucp, by their C names without ``ucp_``."""

    def __init__(self, path: str) -> None:
        try:
            library = ctypes.CDLL(path)
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise UcpMissingError(
                f"libucp cannot be used ({error}); install the extra 'ucx' (pip install 'onepiece[ucx]'), a"
                f" system package such as libucx0, or name a libucp.so.0 in {LIBRARY_VARIABLE}"
            ) from error
        self.path = path
        self._library = library

    def function(self, name: str) -> Callable[..., Any]:
        """A function as it is, for where each microsecond counts."""
        found: Callable[..., Any] = getattr(self._library, f"ucp_{name}")
        return found

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a status; raises ``UcpError``."""
        status = self.function(name)(*arguments)
        if status != OK:
            raise UcpError(status, f"ucp_{name}")

    @property
    def version(self) -> str:
        """Of the library that was loaded."""
        parts = (c_uint(), c_uint(), c_uint())
        self.function("get_version")(*(ctypes.byref(part) for part in parts))
        return ".".join(str(part.value) for part in parts)

    def context(self, settings: dict[str, str], features: int) -> int:
        """A context with these settings (without ``UCX_``) that threads may share; it is never freed."""
        config, context = c_void_p(), c_void_p()
        self.call("config_read", None, None, ctypes.byref(config))
        try:
            for name, value in settings.items():
                self.call("config_modify", config, name.encode(), value.encode())
            params = ContextParams(
                field_mask=CONTEXT_FEATURES | CONTEXT_SHARED, features=features, mt_workers_shared=1
            )
            self.call("init_version", *_API, ctypes.byref(params), config, ctypes.byref(context))
        finally:
            self.function("config_release")(config)
        assert context.value is not None
        return context.value


def outcome(request: int | None, call: str) -> int | None:
    """What a call with a request returned: None if it is complete, else the request; raises ``UcpError``."""
    if request is not None and request >= _POINTERS + _STATUS_LAST:
        raise UcpError(request - _POINTERS, f"ucp_{call}")
    return request


@cache
def load() -> Library:
    """The library; raises ``UcpMissingError``."""
    # UCX writes its warnings to standard output, which belongs to the program, unless told otherwise.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    return Library(_path())


def _path() -> str:
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return named
    package = find_spec("libucx")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        path = Path(folder, "lib", "libucp.so.0")
        if path.exists():
            return str(path)
    return "libucp.so.0"
