"""What ``onepiece bench hop`` compares: each backend's chain of three empty stages.

Every chain has the same shape, measuring process -> stage -> stage -> stage -> measuring process, each
stage in a process of its own on this machine, joined over loopback. With more than one lap the third stage
hands on to the first, each hop still from one process to another. A chain takes a payload and gives
back a reply; looking at it and letting go of it is work of ``Reply.close`` and stands outside the
latency. Payloads are arrays, as pipelines send them; pyzmq sends their memory.

* ``onepiece-loop``, ``onepiece-thread``: this project with the two isolations of a stage. The measuring
  process is a node too, with proxy, result store and manager. A request is answered when its last
  event is there: its result is in the store of the measuring process then, and survives it. Results
  are read back, checked and purged when a cell's clock has stopped.
* ``pyzmq``: frames pushed on as they were pulled; no serialiser, no errors, no routing but the laps left,
  which the third stage counts down. Its stages run on asyncio's own loop; those of ``pyzmq-node-loop`` on
  the loop that nodes use, as the measuring process does.
* ``dask``: three workers, tasks chained by futures; payloads of 64 KiB and more are scattered.
* ``ray``: three actors, calls chained by references.
"""

import asyncio
import contextlib
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from attrs import define, frozen

from onepiece.cli.bench_hop_process import NAME_BYTES
from onepiece.cli.bench_stages import LAPS
from onepiece.codec import value_from_bytes
from onepiece.node.node import Node, open_node
from onepiece.node.options import NodeOptions
from onepiece.node.proxy_service import ProxyService
from onepiece.node.stopping import StopSignal
from onepiece.requests import RequestState
from transports import Address

STAGES: Final = 3
SERIAL_BYTES: Final = 8
_LOOPBACK: Final = "127.0.0.1"
_START_SECONDS: Final = 60.0
_LEASE_SECONDS: Final = 60.0
"""A machine that is busy with several backends is slow, not dead."""
_SCATTER_BYTES_MIN: Final = 64 << 10
WORKER_INBOX_BYTES: Final = 256 << 20


@frozen
class Seen:
    """What of an answer is looked at."""

    length: int
    serial: bytes
    last: int


class Reply(ABC):
    """An answer that has arrived in the measuring process."""

    @abstractmethod
    async def close(self) -> Seen:
        """Look at it and let go of it."""


class Chain(ABC):
    """Three stages and the way through them."""

    @abstractmethod
    async def request(self, payload: bytearray, laps: int) -> Reply:
        """Send a payload through the stages so often; it stays unchanged until the reply is there.

        ``laps`` is 1 or ``LAPS``.
        """


@frozen
class Backend:
    """A way of joining three stages."""

    name: str
    package: str
    """The module it needs."""
    extra: str
    """What to install for it."""
    open: Callable[[], AbstractAsyncContextManager[Chain]]
    is_checked_later: bool = False
    """Its replies lie in a store, and are looked at behind the clock; others are looked at at once."""

    @property
    def is_installed(self) -> bool:
        """Whether it can be measured here."""
        return find_spec(self.package) is not None


@frozen
class _Bytes(Reply):
    """A reply whose bytes lie in this process."""

    data: Any

    async def close(self) -> Seen:
        view = memoryview(self.data).cast("B")
        return Seen(len(view), bytes(view[:SERIAL_BYTES]), view[-1])


# This project.


def _array(payload: bytearray) -> Any:
    """What pipelines send: elements, of which everybody knows how to take their memory as it is."""
    return np.frombuffer(payload, np.uint8).copy()


@define(eq=False)
class _Runtime(Chain):
    proxy: ProxyService
    workflows: Mapping[int, str]
    """By the number of laps."""

    async def request(self, payload: bytearray, laps: int) -> Reply:
        status = await self.proxy.submit(
            self.workflows[laps], {"payload": _array(payload)}, timeout_seconds=None, key=None
        )
        async for _ in self.proxy.events(status.uid, -1):
            pass
        return _Stored(self.proxy, status.uid)


@frozen
class _Stored(Reply):
    """A reply in the result store of this process."""

    proxy: ProxyService
    uid: str

    async def close(self) -> Seen:
        status = await self.proxy.status(self.uid)
        if status.state is not RequestState.FINISHED:
            raise RuntimeError(f"request {self.uid} is {status.state.value}: {status.error}")
        result = await self.proxy.result(self.uid)
        stored = b"".join([piece async for piece in result.read(0, result.total_bytes)])
        await self.proxy.purge(self.uid)
        return await _Bytes(np.asarray(value_from_bytes(stored))).close()


def _open_runtime(workflow: str) -> Callable[[], AbstractAsyncContextManager[Chain]]:
    workflows = {1: workflow, LAPS: f"{workflow}_laps"}

    @asynccontextmanager
    async def opened() -> AsyncIterator[Chain]:
        options = NodeOptions(
            roles=frozenset({"proxy", "store", "manager"}),
            workflows=tuple(f"onepiece.cli.bench_stages:{name}" for name in workflows.values()),
            workers=STAGES,
            listen=Address.parse(f"tcp://{_LOOPBACK}:0"),
            inbox_bytes=WORKER_INBOX_BYTES,
            lease_seconds=_LEASE_SECONDS,
        )
        async with open_node(options, StopSignal()) as node, contextlib.AsyncExitStack() as stack:
            for _ in range(STAGES):
                await stack.enter_async_context(_process(*_worker_arguments(node.address)))
            yield _Runtime(await _ready_proxy(node), workflows)

    return opened


def _worker_arguments(join: str) -> tuple[str, ...]:
    return (
        "node",
        *("--roles", "worker"),
        *("--join", join),
        *("--devices", "cpu:0=1GiB"),
        *("--inbox-bytes", f"{WORKER_INBOX_BYTES >> 20}MiB"),
        *("--lease-seconds", f"{_LEASE_SECONDS:.0f}"),
        *("--log-level", "warning"),
    )


async def _ready_proxy(node: Node) -> ProxyService:
    """The proxy, once each stage is ready in a process of its own."""
    proxy = node.proxy
    assert proxy is not None, "the node has the role proxy"
    async with asyncio.timeout(_START_SECONDS):
        while not proxy.readiness().ready:
            await node.env.routes.changed.wait()
    busy = [view.node for view in proxy.nodes() if view.actors]
    if len(busy) != STAGES:
        raise RuntimeError(f"the stages were placed on {busy}: one on each of {STAGES} nodes is wanted")
    return proxy


@asynccontextmanager
async def _process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run one of ``bench_hop_process``; it is told to end with the context, and waited for."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "onepiece.cli.bench_hop_process",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


# pyzmq: a message library of long standing, bare.


@define(eq=False)
class _Zmq(Chain):
    push: Any
    waiting: dict[bytes, asyncio.Future[Any]]
    serial: int = 0

    async def request(self, payload: bytearray, laps: int) -> Reply:
        self.serial += 1
        name = self.serial.to_bytes(NAME_BYTES, "little")
        answer = self.waiting[name] = asyncio.get_running_loop().create_future()
        await self.push.send_multipart([name + bytes([laps - 1]), payload], copy=False)
        return _Bytes(await answer)


def _open_zmq(process: str) -> Callable[[], AbstractAsyncContextManager[Chain]]:
    return lambda: _zmq_chain(process)


@asynccontextmanager
async def _zmq_chain(kind: str) -> AsyncIterator[Chain]:
    import zmq.asyncio

    async with contextlib.AsyncExitStack() as stack:
        context = stack.enter_context(zmq.asyncio.Context())
        pull, push = (
            stack.enter_context(context.socket(zmq.PULL)),
            stack.enter_context(context.socket(zmq.PUSH)),
        )
        pull.linger = push.linger = 0
        onward = f"tcp://{_LOOPBACK}:{pull.bind_to_random_port(f'tcp://{_LOOPBACK}')}"
        for place in ("last", "inner", "inner"):  # the last one first: each is told where it pushes to
            process = await stack.enter_async_context(_process(kind, place, onward))
            assert process.stdout is not None
            async with asyncio.timeout(_START_SECONDS):
                onward = (await process.stdout.readline()).decode().strip()
            if not onward:
                raise RuntimeError("a stage of pyzmq did not start; its error stands above")
        push.connect(onward)
        await push.send_multipart([b"", onward.encode()])  # the last stage learns where a lap begins
        chain = _Zmq(push, {})
        reading = asyncio.ensure_future(_read_zmq(pull, chain.waiting))
        try:
            yield chain
        finally:
            reading.cancel()
            await asyncio.wait([reading])


async def _read_zmq(pull: Any, waiting: Mapping[bytes, asyncio.Future[Any]]) -> None:
    while True:
        name, body = await pull.recv_multipart(copy=False)
        waiting.pop(name.bytes[:NAME_BYTES]).set_result(body.buffer)  # type: ignore[attr-defined]  # a dict, read here


# Dask distributed.


def _hand_on(value: Any) -> Any:
    return value


@define(eq=False)
class _Dask(Chain):
    client: Any
    workers: list[str]
    serial: int = 0

    async def request(self, payload: bytearray, laps: int) -> Reply:
        self.serial += 1
        serial = self.serial  # others begin while this one scatters, and keys must differ
        value: Any = _array(payload)
        if len(payload) >= _SCATTER_BYTES_MIN:
            value = await self.client.scatter(value, workers=[self.workers[0]], direct=True, hash=False)
        for number, worker in enumerate(self.workers * laps):
            key = f"hop{number}-{serial}"
            value = self.client.submit(_hand_on, value, key=key, workers=[worker], pure=False)
        return _Bytes(await self.client.gather(value, direct=True))


@asynccontextmanager
async def _open_dask() -> AsyncIterator[Chain]:
    distributed: Any = importlib.import_module("distributed")  # its own types are few
    async with (
        distributed.LocalCluster(
            n_workers=STAGES,
            threads_per_worker=1,
            processes=True,
            host=_LOOPBACK,
            dashboard_address=None,
            asynchronous=True,
            silence_logs=50,
        ) as cluster,
        distributed.Client(cluster, asynchronous=True, direct_to_workers=True) as client,
    ):
        yield _Dask(client, [worker.worker_address for worker in cluster.workers.values()])


# Ray.


@define(eq=False)
class _Ray(Chain):
    actors: list[Any]

    async def request(self, payload: bytearray, laps: int) -> Reply:
        value: Any = _array(payload)
        for actor in self.actors * laps:
            value = actor.hand_on.remote(value)
        return _Bytes(await value)


@asynccontextmanager
async def _open_ray() -> AsyncIterator[Chain]:
    import ray

    class Stage:
        def hand_on(self, value: Any) -> Any:
            return value

    # In a thread: it takes seconds, in which the other backends' heartbeats must not stand still.
    await asyncio.to_thread(
        ray.init,
        num_cpus=STAGES + 1,
        include_dashboard=False,
        _node_ip_address=_LOOPBACK,
        log_to_driver=False,
    )
    try:
        remote = ray.remote(num_cpus=0)(Stage)
        yield _Ray([remote.remote() for _ in range(STAGES)])
    finally:
        ray.shutdown()


BACKENDS: Final[dict[str, Backend]] = {
    backend.name: backend
    for backend in (
        Backend("pyzmq", "zmq", "-e '.[bench]'", _open_zmq("zmq")),
        Backend("pyzmq-node-loop", "zmq", "-e '.[bench]'", _open_zmq("zmq-node-loop")),
        *(
            Backend(f"onepiece-{short}", "onepiece", "onepiece", _open_runtime(name), is_checked_later=True)
            for short, name in (("loop", "arrays_through_loop"), ("thread", "arrays_through_threads"))
        ),
        Backend("dask", "distributed", "-e '.[bench]'", _open_dask),
        Backend("ray", "ray", "ray", _open_ray),
    )
}
