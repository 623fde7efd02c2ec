"""The helper process of an isolated stage: a node's runtime for one stage, without the node.

Its main thread talks with the node; the stage's setup and body run on threads of their own, exactly as
those of a stage with ``isolation="thread"`` do in a node. So a body that blocks is still told to stop,
and what it reported before is still sent.

It never outlives the node: the kernel kills it when the node's thread that started it ends, and it
leaves when the socket closes.
"""

import asyncio
import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import define, evolve, field

from onepiece import _torch
from onepiece._bounded import described, trace_of
from onepiece.context import StageContext
from onepiece.errors import CodecError, OnePieceError, SchemaMismatch
from onepiece.graph import INPUTS, Isolation, Kind, Parameter, TypeSpec
from onepiece.limits import (
    ISOLATED_PROGRESS_SECONDS,
    ISOLATED_TERMINATE_SECONDS,
)
from onepiece.log import configure, get_logger
from onepiece.messages import StageInput
from onepiece.requests import EventKind
from onepiece.runtime.devices import DeviceThreads, open_device_threads, torch_name
from onepiece.runtime.isolated_channel import (
    EndOfIsolated,
    IsolatedCall,
    IsolatedChannel,
    IsolatedError,
    IsolatedGo,
    IsolatedPass,
    IsolatedProgress,
    IsolatedReady,
    IsolatedRefusal,
    IsolatedReturn,
    IsolatedStart,
    IsolatedStop,
    IsolatedUnload,
    IsolatedWaiting,
    Outgoing,
    Received,
    map_in,
)
from onepiece.runtime.isolated_start import Surroundings
from onepiece.runtime.loaded_stage import LoadedStage
from onepiece.runtime.memory_meter import ProcessMeter
from onepiece.runtime.request_scheduler import Held, StageTask
from onepiece.runtime.task_worker import RunningStage, TaskWorker
from onepiece.stage import Stage
from onepiece.workflow import Workflow

_PR_SET_PDEATHSIG: Final = 1
_NODE_IS_GONE: Final = 1

AnyStage = Stage[Any, Any, Any]


def find_stage(start: IsolatedStart) -> AnyStage:
    """Import the stage.

    Raises:
        ImportError: Its module cannot be imported, or has no stage of this name.
        SchemaMismatch: It has, with another schema: the file has changed since the node read it.
    """
    module_name, _, _ = start.stage.partition(":")
    module = importlib.import_module(module_name)
    named = [stage for stage in _stages_in(vars(module)) if stage.key == start.stage]
    if not named:
        raise ImportError(
            f"{module_name} has no stage {start.stage!r} at its top, nor a workflow with it; a helper"
            " process can only import stages that stand there"
        )
    for stage in named:
        if stage.spec.signature == start.signature:
            return stage
    raise SchemaMismatch(
        f"{start.stage} is {named[0].spec.signature} here, and {start.signature} on {start.node}: its file"
        " has changed since the node was started; restart the node"
    )


def _stages_in(names: Mapping[str, Any]) -> Iterator[AnyStage]:
    for value in list(names.values()):
        if isinstance(value, Stage):
            yield value
        elif isinstance(value, Workflow):
            yield from value.stages.values()


class _Reports:
    """Progress on its way to the node: the newest of each call and kind, now and then."""

    def __init__(self, channel: IsolatedChannel) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, EventKind], Mapping[str, Any]] = {}
        self._is_scheduled = False
        self._sent_at = 0.0

    def put(self, number: int, kind: EventKind, detail: Mapping[str, Any]) -> None:
        """Callable from any thread; never waits."""
        with self._lock:
            self._waiting[number, kind] = detail
            if self._is_scheduled:
                return
            self._is_scheduled = True
        self._loop.call_soon_threadsafe(self._schedule)

    def _schedule(self) -> None:
        wait = max(0.0, self._sent_at + ISOLATED_PROGRESS_SECONDS - self._loop.time())
        self._loop.call_later(wait, self._send_all)

    def _send_all(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            self._is_scheduled = False
        self._sent_at = self._loop.time()
        for (number, kind), detail in waiting.items():
            self._send(number, kind, detail)

    def finish(self, number: int) -> None:
        """Send what waits for a call that is about to end."""
        with self._lock:
            waiting = {key: self._waiting.pop(key) for key in list(self._waiting) if key[0] == number}
        for (_, kind), detail in waiting.items():
            self._send(number, kind, detail)

    def _send(self, number: int, kind: EventKind, detail: Mapping[str, Any]) -> None:
        try:
            progress = self._channel.prepare(IsolatedProgress(number, kind.value), {"detail": dict(detail)})
        except CodecError as error:
            get_logger().warning("progress_not_sent", error=error.message)
            return
        self._channel.send(progress)


class _Group:
    """The ``torch.distributed`` group of a stage on several devices: made when it is first asked for."""

    def __init__(self, start: IsolatedStart, channel: IsolatedChannel) -> None:
        self._start = start
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._group: Any = None

    def join(self) -> Any:
        """The group; callable from any thread, blocks the first time until all ranks have called it."""
        start = self._start
        with self._lock:
            if self._group is None:
                assert start.meeting is not None
                self._loop.call_soon_threadsafe(self._pass)
                device = torch_name(start.device)
                self._group = _torch.join_group(device, start.meeting, start.rank, start.world_size)
        return self._group

    def _pass(self) -> None:
        """Whoever waits for the others must not keep them from coming."""
        self._channel.send(self._channel.prepare(IsolatedPass()))

    def leave(self) -> None:
        """Take it down, if there is one."""
        if self._group is not None:
            _torch.leave_group()


@define(eq=False)
class _Running:
    context: RunningStage
    task: asyncio.Task[Any]


@define(eq=False)
class _Helper:
    """A loaded stage, and the calls under way."""

    start: IsolatedStart
    stage: AnyStage
    state: Any
    threads: DeviceThreads
    channel: IsolatedChannel
    reports: _Reports
    group: _Group
    meter: ProcessMeter
    running: dict[int, _Running] = field(factory=dict)

    async def serve(self) -> None:
        """Run calls until told to unload."""
        async with asyncio.TaskGroup() as calls:
            while True:
                received = await self._receive()
                match received.header:
                    case IsolatedCall():
                        calls.create_task(self._call(received))
                        del received
                    case IsolatedStop(number=number, reason=reason):
                        running = self.running.get(number)
                        if running is not None and not running.context.cancelled:
                            running.context.stop(OnePieceError.from_wire(reason))
                            running.task.cancel()
                    case IsolatedUnload():
                        return
                    case other:
                        raise CodecError(f"a {type(other).__name__} comes from helpers, not from nodes")

    async def _receive(self) -> Received:
        try:
            return await self.channel.receive()
        except EndOfIsolated:
            os._exit(_NODE_IS_GONE)  # nobody is left to unload for, and calls may never end

    async def _call(self, received: Received) -> None:
        call = received.header
        assert isinstance(call, IsolatedCall)
        context = _context(self.start, self.threads, self.state, self.reports, self.group, call)
        task = asyncio.current_task()
        assert task is not None
        self.running[call.number] = _Running(context, task)

        def package(value: Any, compute_seconds: float) -> Outgoing:
            is_wanted = self.start.rank == 0 or self.stage.merge is not None
            values = {"value": value} if is_wanted else {}
            returned = IsolatedReturn(call.number, compute_seconds, self.meter.peak_bytes())
            return self.channel.prepare(returned, values)

        stage_task = _as_work(received, call)
        del received
        try:
            stage = _merging(self.stage) if call.is_merge else self.stage
            outcome = await TaskWorker(stage, self.threads).execute(stage_task, context, package, _nothing)
        finally:
            del self.running[call.number]
        self.reports.finish(call.number)
        if outcome.shipment is not None:
            self.channel.send(outcome.shipment)
        else:
            assert outcome.error is not None
            error = IsolatedError(call.number, outcome.error.to_wire(), outcome.is_dirty)
            self.channel.send(self.channel.prepare(error))


def _merging(stage: AnyStage) -> AnyStage:
    """A stage that merges what this one's ranks returned: its errors and its type are checked alike."""
    merge = stage.merge
    assert merge is not None

    async def merged(ctx: StageContext[Any], /, *, partials: list[Any]) -> Any:
        return await ctx.run(merge, partials)

    partials = Parameter("partials", TypeSpec(Kind.LIST, (stage.spec.returns,)))
    return evolve(stage, function=merged, spec=evolve(stage.spec, parameters=(partials,)))


def _context(
    start: IsolatedStart,
    threads: DeviceThreads,
    state: Any,
    reports: _Reports,
    group: _Group,
    call: IsolatedCall,
) -> RunningStage:
    def progress(kind: EventKind, detail: Mapping[str, Any]) -> None:
        if call.number and start.rank == 0:
            reports.put(call.number, kind, detail)

    return RunningStage(
        state_value=state,
        device=torch_name(threads.name),
        uid=call.uid,
        stage=call.stage,
        node=start.node,
        attempt=call.attempt,
        deadline_at=call.deadline_at,
        threads=threads,
        progress=progress,
        rank=start.rank,
        world_size=start.world_size,
        join=None if start.world_size == 1 else group.join,
    )


def _as_work(received: Received, call: IsolatedCall) -> StageTask:
    """The call as the runtime knows it in a node: all inputs from one source."""
    now = time.time()
    header = StageInput(call.uid, "", call.stage, INPUTS, "", now, call.deadline_at, now)

    def release() -> None:
        held.values = {}
        held.payload = memoryview(b"")  # the last to refer to the memory that the node has shared

    held = Held(header, received.values, received.body, now, call.attempt, release)
    stage_task = StageTask(call.uid, "", call.stage, frozenset({INPUTS}))
    stage_task.take(held)
    return stage_task


def _nothing(_: object) -> None:
    """Whether a call is late is the node's to tell."""


async def _live(channel: IsolatedChannel) -> None:
    start = (await channel.receive()).header
    if not isinstance(start, IsolatedStart):
        raise CodecError(f"a {type(start).__name__} before any IsolatedStart")
    configure("json" if start.log_format == "json" else "text", start.log_level)
    sys.path[:] = start.import_paths
    try:
        found = find_stage(start)
    except BaseException as error:  # noqa: BLE001 - a module may raise anything
        await _refuse(channel, error)
        return
    group = _Group(start, channel)
    if start.meeting is not None:
        os.set_inheritable(start.meeting, False)
        await _until_others_have_loaded(channel)
    # The node keeps the time; beside that the stage runs as it would in the node.
    stage = evolve(found, spec=evolve(found.spec, isolation=Isolation.THREAD, timeout_seconds=None))
    reports = _Reports(channel)
    async with (
        open_device_threads(start.device, close_seconds=ISOLATED_TERMINATE_SECONDS) as threads,
        asyncio.TaskGroup() as tasks,
    ):
        loaded = LoadedStage(stage, threads, Surroundings(start.node, tasks))
        meter = ProcessMeter.begun(start.device)
        setup = IsolatedCall(0, "", stage.name, 1, None)
        try:
            state = await loaded.load(_context(start, threads, None, reports, group, setup))
        except Exception as error:  # noqa: BLE001 - so may a setup
            await _refuse(channel, error)
            return
        channel.send(channel.prepare(IsolatedReady(meter.peak_bytes())))
        await _Helper(start, stage, state, threads, channel, reports, group, meter).serve()
        await loaded.unload()
        group.leave()
    await channel.flushed()


async def _until_others_have_loaded(channel: IsolatedChannel) -> None:
    channel.send(channel.prepare(IsolatedWaiting()))
    answer = (await channel.receive()).header
    if not isinstance(answer, IsolatedGo):
        raise CodecError(f"a {type(answer).__name__} before any IsolatedGo")


async def _refuse(channel: IsolatedChannel, error: BaseException) -> None:
    channel.send(channel.prepare(IsolatedRefusal(described(error), trace_of(error))))
    await channel.flushed()


async def _run(descriptor: int) -> None:
    channel = IsolatedChannel(socket.socket(fileno=descriptor), map_in)
    try:
        await _live(channel)
    except EndOfIsolated:
        os._exit(_NODE_IS_GONE)
    finally:
        channel.close()


def main() -> None:
    """Serve the node that has started this process; its arguments are the node's business."""
    _, _, stage, descriptor, node = sys.argv
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(node):  # it died before the line above
        os._exit(_NODE_IS_GONE)
    os.set_inheritable(int(descriptor), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the node decides when this ends
    faulthandler.enable()  # where it crashed, in the node's log
    del stage  # it is there for people who list processes
    asyncio.run(_run(int(descriptor)))
