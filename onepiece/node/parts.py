"""What a node takes from the machine it runs on: time, chance, wires, files, threads and sockets.

A node is composed in one place (``node.py``) of parts that do not know where these come from. So the
simulations run the same node on virtual time, over simulated wires and disks.
"""

import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from attrs import field, frozen

from onepiece.coordination import Coordinator, open_embedded
from onepiece.node.proxy import serve
from onepiece.runtime.devices import DeviceThreads, open_device_threads
from onepiece.runtime.environment import Clock
from onepiece.store import RequestLog, ResultStore, StoreOptions
from onepiece.workflow import Workflow
from transports import Address, Transport, transport_for


def _open_device(name: str, close_seconds: float) -> AbstractAsyncContextManager[DeviceThreads]:
    return open_device_threads(name, close_seconds=close_seconds)


@frozen(kw_only=True)
class NodeParts:
    """Where a node gets what it needs; the defaults are those of a real machine."""

    now: Clock = time.time
    monotonic: Clock = time.monotonic
    """The same as the loop's."""
    rng: random.Random = field(factory=random.SystemRandom)
    host_name: Callable[[], str] = socket.gethostname
    process_id: int = field(factory=os.getpid)
    find_transport: Callable[[Address], Transport] = transport_for
    open_device: Callable[[str, float], AbstractAsyncContextManager[DeviceThreads]] = _open_device
    """By name; the number says for how many seconds closing waits."""
    open_results: Callable[[Path, StoreOptions], AbstractAsyncContextManager[ResultStore]] = ResultStore.open
    open_requests: Callable[[Path, StoreOptions], AbstractAsyncContextManager[RequestLog]] = RequestLog.open
    open_coordinator: Callable[[Path], AbstractAsyncContextManager[Coordinator]] = open_embedded
    serve_http: Callable[[Any, str, int], AbstractAsyncContextManager[int]] = serve
    """Serves the proxy's application at host and port; gives the port that was bound."""
    workflows: Mapping[str, Workflow[Any, Any]] = field(factory=dict)
    """Those that are imported already, by reference."""
