"""A simulated machine: a disk, clocks, a place in the network, and one node process after another.

A process can end in three ways: it drains and leaves, it is killed, or its machine goes dark. Killed
means that nothing it does from then on has an effect: its wires are cut and its disk takes nothing
*before* its tasks are cancelled, so no clean-up of theirs is seen by anybody. What then runs is only to
give memory back; that it ends is checked.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

from attrs import define, evolve, field

from onepiece.errors import OnePieceError
from onepiece.node.node import Node, open_node, serve_until_stopped
from onepiece.node.options import NodeOptions
from onepiece.node.parts import NodeParts
from onepiece.node.proxy_service import ProxyService
from onepiece.node.stopping import StopSignal
from onepiece.runtime.devices import DeviceThreads
from onepiece.workflow import Workflow
from simulations.loop import Process, VirtualLoop, branch
from simulations.sim_disk import SimDisk
from simulations.sim_network import Network
from simulations.sim_stages import KILL
from simulations.sim_trace import Trace
from simulations.sim_transport import SimTransport
from transports.background import Background

_Answer = TypeVar("_Answer")

EPOCH: Final = 1_800_000_000.0
"""When the world begins, on a wall clock that is right."""
RESTART_SECONDS: Final = 3.0
"""When a node that ended of itself, or was ended by a stage, is started again."""
BURIAL_SECONDS: Final = 90.0
"""How long a process that was cut off may take to give its memory back."""


class Unreachable(Exception):  # noqa: N818  # named by what happened, as in transports.errors
    """A client got no answer: whether what it asked for was done is not known."""


@define(eq=False)
class World:
    """What all machines of a run share."""

    loop: VirtualLoop
    network: Network
    trace: Trace
    rng: Random
    directory: Path
    workflows: dict[str, Workflow[Any, Any]]
    watch: Callable[[Process, Node], None] = lambda *_: None
    """Told of each node that is open."""
    lost_answers: float = 0.0
    """Of a client's calls, to be carried out without an answer."""
    repeated_calls: float = 0.0
    """Of a client's calls, to be carried out twice."""


@define(eq=False)
class _Life:
    """One process of a machine."""

    process: Process
    stop: StopSignal
    calls: Background
    task: "asyncio.Task[None] | None" = None
    node: Node | None = None
    answers: dict["asyncio.Future[Any]", None] = field(factory=dict)
    is_dead: bool = False
    was_stopped: bool = False


class SimMachine:
    """One machine of the set.

    Args:
        world: Where it stands.
        options: Of the nodes that run on it; address and directory are its own.
        disk_seconds: What a job of its disk takes.
        wall_offset: How far its wall clock is wrong.
    """

    def __init__(
        self, world: World, options: NodeOptions, *, disk_seconds: float, wall_offset: float
    ) -> None:
        assert options.name is not None, "machines have names"
        self.name = options.name
        self.wall_offset = wall_offset
        self.disk = SimDisk(world.directory / self.name, branch(world.rng), disk_seconds)
        self.lives = 0
        self.when_asked: dict[str, Callable[[], None]] = {}
        """What is to happen, once, when a client's call of this name begins here."""
        self.deaths: list[float] = []
        """When its processes died, or were stopped."""
        self._options = evolve(options, state_dir=self.disk.path)
        self._world = world
        self._host = world.network.host(self.name)
        self._life: _Life | None = None
        self._restarts = False
        self._is_closed = False
        self._ended = asyncio.Event()
        self._ended.set()
        self._background = Background(self._failed)

    @property
    def options(self) -> NodeOptions:
        """Of its nodes."""
        return self._options

    @property
    def node(self) -> Node | None:
        """The node that runs here and is open."""
        return None if self._life is None or self._life.is_dead else self._life.node

    @property
    def process(self) -> Process | None:
        """The process that runs here."""
        return None if self._life is None or self._life.is_dead else self._life.process

    @property
    def is_down(self) -> bool:
        """Nothing runs here, nor is anything left of what did."""
        return self._life is None

    def wall_clock(self) -> float:
        """Seconds since the epoch, as this machine has it."""
        return EPOCH + self._world.loop.now + self.wall_offset

    # --- life and death ------------------------------------------------------------------------

    def start(self) -> None:
        """Start a node, if none runs; behind the last one if that is just ending."""
        if self._is_closed:
            return
        if self._life is not None:
            self._restarts = self._life.is_dead
            return
        self.lives += 1
        process = self._world.loop.add_process(f"{self.name}/{self.lives}", self._world.rng.random() * 1e5)
        self._host.process, self._host.is_dark = process, False
        life = self._life = _Life(process, StopSignal(), Background(self._failed))
        self._ended.clear()
        self._world.trace.tell(self.name, f"starts life {self.lives}")
        life.task = process.start(self._live(life), self.name)
        self._background.start(self._bury(life))

    async def _live(self, life: _Life) -> None:
        KILL.set(self._kill_by_stage)
        try:
            async with open_node(self._options, life.stop, self._parts()) as node, life.calls:
                life.node = node
                self._world.watch(life.process, node)
                try:
                    await serve_until_stopped(node, life.stop)
                finally:
                    life.node = None
        except* OnePieceError as errors:
            self._world.trace.tell(self.name, f"could not go on: {_first(errors)}")

    async def _bury(self, life: _Life) -> None:
        """Wait until nothing is left of a process, and forget it."""
        assert life.task is not None
        await asyncio.wait([life.task])
        loop = self._world.loop
        give_up_at = loop.now + BURIAL_SECONDS
        while (left := loop.tasks_of(life.process)) and loop.now < give_up_at:
            await asyncio.wait(left, timeout=BURIAL_SECONDS)
        if left:
            self._world.trace.fail(f"{life.process.name} has ended, and {left} go on")
        elif not life.task.cancelled() and (error := life.task.exception()) is not None:
            loop.call_exception_handler({"message": f"{self.name} failed", "exception": error})
        if not life.is_dead:
            self._world.trace.tell(self.name, "has left")
            self._world.network.bury(self._host, silently=False)
            self._cut_off(life)
            if not life.was_stopped:  # by nobody but itself: whatever supervises it starts it again
                loop.at(loop.now + RESTART_SECONDS, self.start)
        loop.remove_process(life.process)
        self._life = None
        self._ended.set()
        if self._restarts:
            self._restarts = False
            self.start()

    def stop(self) -> None:
        """Have the node drain and leave."""
        if self.process is not None and self._life is not None:
            self._world.trace.tell(self.name, "is told to stop")
            self._life.was_stopped = True
            self._life.process.call_soon(self._life.stop.request)

    def kill(self, *, why: str, silently: bool) -> None:
        """End its process between two steps; ``silently``: its wires are not reset, nobody answers."""
        life = self._life
        if life is None or life.is_dead:
            return
        self._world.trace.tell(self.name, f"dies ({why}{', and goes dark' if silently else ''})")
        self.disk.crash()
        self._world.network.bury(self._host, silently=silently)
        self._cut_off(life)
        life.process.resume()
        assert life.task is not None
        for task in self._world.loop.tasks_of(life.process):
            task.cancel()

    def _kill_by_stage(self) -> None:
        """A stage has taken its process along; somebody starts another one soon."""
        self.kill(why="a stage has ended its process", silently=False)
        self._world.loop.at(self._world.loop.now + RESTART_SECONDS, self.start)

    def _cut_off(self, life: _Life) -> None:
        life.is_dead = True
        self.deaths.append(self._world.loop.now)
        for answer in life.answers:
            self._world.loop.at(self._world.network.arrival(), _fail, answer, "the connection was reset")
        life.answers.clear()

    async def ended(self) -> None:
        """Wait until nothing runs here."""
        await self._ended.wait()

    async def close(self) -> None:
        """End whatever runs here, for good."""
        self._is_closed = True
        self.kill(why="the run is over", silently=False)
        await self.ended()
        await self._background.stop()

    def pause(self) -> None:
        """Stop its process, as SIGSTOP does."""
        if self.process is not None:
            self._world.trace.tell(self.name, "is paused")
            self.process.pause()
            self._world.network.notice_pause(self.process)

    def resume(self) -> None:
        """Let its process go on."""
        if self.process is not None and self.process.is_paused:
            self._world.trace.tell(self.name, "goes on")
            self.process.resume()

    def _failed(self, error: BaseException) -> None:
        self._world.loop.call_exception_handler({"message": f"{self.name} failed", "exception": error})

    # --- what a client asks --------------------------------------------------------------------

    async def call(
        self, work: Callable[[ProxyService], Coroutine[Any, Any, _Answer]], seconds: float
    ) -> _Answer:
        """Ask this machine's proxy, as over HTTP.

        Raises:
            Unreachable: No answer came within ``seconds``.
            OnePieceError: The proxy's answer.
        """
        world = self._world
        answer: asyncio.Future[_Answer] = world.loop.create_future()
        world.loop.at(world.network.arrival(), self._arrive, work, answer)
        if world.rng.random() < world.repeated_calls:
            unheard: asyncio.Future[_Answer] = world.loop.create_future()
            unheard.add_done_callback(lambda done: done.cancelled() or done.exception())
            world.loop.at(world.network.arrival(), self._arrive, work, unheard)
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise Unreachable(f"{self.name} did not answer within {seconds} s") from None

    def _arrive(
        self,
        work: Callable[[ProxyService], Coroutine[Any, Any, _Answer]],
        answer: "asyncio.Future[_Answer]",
    ) -> None:
        life = self._life
        if life is None or life.is_dead or life.node is None or life.node.proxy is None:
            if not self._host.is_dark:
                self._world.loop.at(self._world.network.arrival(), _fail, answer, "nobody listens")
            return
        life.answers[answer] = None
        life.process.call_soon(self._begin, life, life.node.proxy, work, answer)

    def _begin(
        self,
        life: _Life,
        proxy: ProxyService,
        work: Callable[[ProxyService], Coroutine[Any, Any, _Answer]],
        answer: "asyncio.Future[_Answer]",
    ) -> None:
        """Runs in the node's process."""

        async def carry_out() -> None:
            try:
                found = await work(proxy)
            except OnePieceError as error:
                told = error
                self._answer(life, answer, lambda: answer.set_exception(told))
            else:
                self._answer(life, answer, lambda: answer.set_result(found))

        if not life.is_dead:
            self.when_asked.pop(work.__name__, _do_nothing)()
            life.calls.start(carry_out())

    def _answer(self, life: _Life, answer: "asyncio.Future[Any]", settle: Callable[[], None]) -> None:
        world = self._world
        if life.answers.pop(answer, self) is self or world.rng.random() < world.lost_answers:
            return  # it was cut off, or its answer is lost
        world.loop.at(world.network.arrival(), lambda: None if answer.done() else settle())

    # --- what the node is made of --------------------------------------------------------------

    def _parts(self) -> NodeParts:
        world = self._world
        transport = SimTransport(world.network, self._host)
        return NodeParts(
            now=self.wall_clock,
            monotonic=world.loop.time,
            rng=branch(world.rng),
            host_name=lambda: self.name,
            process_id=self.lives,
            find_transport=lambda address: transport,
            open_device=_open_device,
            open_results=self.disk.open_results,
            open_requests=self.disk.open_requests,
            open_coordinator=self.disk.open_coordinator,
            serve_http=_serve_nothing,
            workflows=world.workflows,
        )


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that is no group."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _do_nothing() -> None:
    pass


def _fail(answer: "asyncio.Future[Any]", why: str) -> None:
    if not answer.done():
        answer.set_exception(Unreachable(why))


class _InlineDevice(DeviceThreads):
    """A device without threads: stages of the simulation run on the node's loop."""

    def __init__(self, name: str) -> None:
        super().__init__(name, asyncio.get_running_loop(), None)  # type: ignore[arg-type]  # no thread
        self.name = name

    async def run_stage(self, make: Callable[[], Coroutine[Any, Any, _Answer]]) -> _Answer:
        """Here and now."""
        return await make()

    async def run_compute(self, function: Callable[[], _Answer]) -> _Answer:
        """Here and now."""
        return function()


@asynccontextmanager
async def _open_device(name: str, close_seconds: float) -> AsyncIterator[DeviceThreads]:
    yield _InlineDevice(name)


@asynccontextmanager
async def _serve_nothing(app: Any, host: str, port: int) -> AsyncIterator[int]:
    yield 1
