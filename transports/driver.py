"""Runs programs: the only place where a ring's operations meet a wire, a clock and chance.

A *producer's* program acts on the peer's memory: ``run`` awaits each operation. A *consumer's*
program acts on the region of its own process, so its loads and stores are plain memory accesses and
``RegionRun`` carries them out without suspending, stopping only where a session must be fenced or
what it has exported must be pulled.
"""

import random
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from transports.device_memory import DeviceMemory
from transports.memory import RemoteMemory
from transports.operations import (
    Bytes,
    Carry,
    Chain,
    Claim,
    CompareAndSwap,
    Fence,
    FetchAndAdd,
    Guarded,
    Load,
    Operation,
    Pause,
    PauseReason,
    Peek,
    Program,
    Pull,
    Put,
    Read,
    Store,
)

_Result = TypeVar("_Result")

Waiter = Callable[[Pause], Awaitable[float]]
"""Carries out a ``Pause`` and returns the moment it ended; may raise to abandon the program."""

_FULL_SECONDS: Final = (0.001, 0.1)
"""First and longest wait for room; a nudge ends it early, so the length is only a safety net."""
_CONTENDED_SECONDS: Final = (0.0001, 0.02)
"""First and longest wait after a lost swap; drawn from zero up, so that rivals part."""


def pause_seconds(pause: Pause, rng: random.Random) -> float:
    """How long to wait: doubling with each attempt up to a bound, with jitter."""
    first, longest = _FULL_SECONDS if pause.reason is PauseReason.FULL else _CONTENDED_SECONDS
    bound = min(longest, first * 2.0 ** min(pause.attempt - 1, 30))
    if pause.reason is PauseReason.FULL:
        return bound * rng.uniform(0.5, 1.0)
    return bound * rng.random()


async def run(program: Program[_Result], memory: RemoteMemory, *, wait: Waiter) -> _Result:
    """Run a producer's program over ``memory``.

    Args:
        program: Yields ``Read``, ``CompareAndSwap``, ``FetchAndAdd``, ``Claim``, ``Chain``, ``Put``,
            ``Guarded`` and ``Pause``.
        memory: The session that carries them out.
        wait: Carries out pauses.

    Returns:
        What the program returns.

    Raises:
        TransportError: Whatever the memory or the program raises; the program is closed then.

    Cancellation: the operation under way may still take place, its outcome is lost, and the program
    is closed. Who must know the outcome shields this call.
    """
    try:
        operation = next(program)
        while True:
            outcome = await _carry_out(operation, memory, wait)
            operation = program.send(outcome)
    except StopIteration as stop:
        result: _Result = stop.value
        return result
    finally:
        program.close()


async def _carry_out(operation: Operation, memory: RemoteMemory, wait: Waiter) -> object:
    match operation:
        case Guarded():
            return await memory.guarded(operation)
        case Chain():
            await memory.post(operation)
            return None
        case Put():
            await memory.put(operation)
            return None
        case CompareAndSwap():
            return await memory.compare_and_swap(operation)
        case Claim():
            return await memory.claim(operation)
        case Read(offset, length):
            return await memory.read(offset, length)
        case FetchAndAdd(offset, addend):
            return await memory.fetch_and_add(offset, addend)
        case Pause():
            return await wait(operation)
        case Load() | Peek() | Carry() | Store() | Fence() | Pull():
            raise AssertionError(f"a producer's program yielded {operation!r}, which acts on a region")


class RegionRun(Generic[_Result]):
    """One run of a consumer's program on the region of its own process.

    ``advance`` goes on until the program has finished, wants sessions fenced or an export pulled. The
    caller fences ``wants_fenced``, or pulls ``wants_pulled``, and calls ``advance`` again, with the view that
    the region has then and what was pulled.
    """

    __slots__ = ("_fresh", "_program", "device", "finished", "result", "wants_fenced", "wants_pulled")

    result: _Result
    """What the program returned; set once ``finished``."""

    def __init__(
        self,
        program: Program[_Result],
        device: DeviceMemory | None = None,
        fresh: DeviceMemory | None = None,
    ) -> None:
        self._program = program
        self.device = device
        """The device memory beside the region; behind a fence it may be other memory, as the view may."""
        self._fresh = fresh
        self.finished = False
        self.wants_fenced: tuple[int, ...] = ()
        self.wants_pulled: Pull | None = None

    def advance(self, view: memoryview, pulled: Bytes | None = None) -> None:
        """Carry out loads and stores on the region's memory until the next fence or pull, or the end."""
        assert not self.finished
        outcome: object = pulled
        self.wants_pulled = None
        try:
            while True:
                operation = self._program.send(outcome)
                if type(operation) is Load:
                    outcome = view[operation.offset : operation.offset + operation.length]
                elif type(operation) is Store:
                    view[operation.offset : operation.offset + len(operation.data)] = operation.data
                    outcome = None
                elif type(operation) is Peek:
                    assert self.device is not None, "nothing lies apart from this region"
                    outcome = self.device.peek(operation.offset, operation.length)
                elif type(operation) is Carry:
                    self._carry(operation)
                    outcome = None
                elif type(operation) is Fence:
                    self.wants_fenced = operation.sessions
                    return
                elif type(operation) is Pull:
                    self.wants_pulled = operation
                    return
                else:
                    raise AssertionError(f"a consumer's program yielded {operation!r}, which acts on a peer")
        except StopIteration as stop:
            self.finished = True
            self.result = stop.value

    def _carry(self, carry: Carry) -> None:
        assert self.device is not None, "nothing lies apart from this region"
        assert self._fresh is not None, "there is no memory to carry anything to"
        self._fresh.put(carry.offset, (self.device.span(carry.offset, carry.length),))


def run_on_region(program: Program[_Result], view: memoryview) -> _Result:
    """Run a consumer's program that neither fences nor pulls; returns its result."""
    region_run = RegionRun(program)
    region_run.advance(view)
    assert region_run.finished, "this program must neither fence nor pull"
    return region_run.result
