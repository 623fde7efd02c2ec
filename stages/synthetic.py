r"""Workflows of set cost, size and failure that check themselves: for load, tests and chaos.

::

    noop      relay -> relay -> relay                 passes bytes on, on the node's loop: pure overhead

    chain     first -> second -> third                each waits, reports, checks what came, sends on

    diamond           /-> left --\
              split -<            >- merge            the same with a join of two
                      \-> right -/

Every payload follows from the request's seed and the sending stage, so the receiver checks every byte
of it. Every stage seals what it sends with a digest over what it received; ``expected_digest`` computes
the last one without running anything, and a client compares.
"""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NoReturn

import anyio
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from onepiece import StageContext, stage, workflow

Failure = Literal["none", "raise", "exit", "interrupt", "memory", "kill", "wrong_type", "hang", "block"]
"""What happens at the failing stage, once its work is done.

raise       a RuntimeError
exit        sys.exit(1)
interrupt   a KeyboardInterrupt
memory      a MemoryError
kill        SIGKILL to the process it runs in
wrong_type  a dict is returned where the signature names a Parcel
hang        waits for ever, can be cancelled
block       blocks its thread, cannot be cancelled
"""

Cost = Literal["sleep", "spin"]
"""``sleep`` waits, as for a GPU; ``spin`` computes in Python and holds the interpreter's lock."""

CHAIN_STAGES: Final = ("first", "second", "third")
DIAMOND_STAGES: Final = ("split", "left", "right", "merge")
PAYLOAD_BYTES_MAX: Final = 1 << 32
_BLOCK_SECONDS: Final = 24 * 3600.0
_MULTIPLIER: Final = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: neighbours differ in every byte


@frozen
class Task:
    """What one request asks of every stage of its workflow."""

    seconds: tuple[float, ...]
    """For each stage."""
    payload_bytes: tuple[int, ...]
    """What each stage sends."""
    steps: int
    cost: Cost
    seed: int
    failure: Failure
    failing_stage: str
    first_attempt_only: bool


@frozen(eq=False)
class Parcel:
    """What one stage sends to the next."""

    task: Task
    sender: str
    payload: NDArray[np.uint8]
    digest: str


@frozen(eq=False)
class Outcome:
    """What a workflow returns."""

    digest: str
    payload: NDArray[np.uint8]


def pattern(seed: int, sender: str, payload_bytes: int) -> NDArray[np.uint8]:
    """The payload that the stage ``sender`` sends in a request with this seed."""
    words = np.arange(-(-payload_bytes // 8), dtype=np.uint64)
    words += np.uint64(int.from_bytes(_sha256(b"%d" % seed, sender.encode())[:8], "little"))
    words *= np.uint64(_MULTIPLIER)
    return words.view(np.uint8)[:payload_bytes]


def seal(received: Sequence[str], sender: str, payload: NDArray[np.uint8]) -> str:
    """The digest of a stage's output: over the digests it received, its name, and its payload."""
    return _sha256(*(digest.encode() for digest in received), sender.encode(), payload.data).hex()


def expected_digest(
    workflow_name: Literal["chain", "diamond"], payload_bytes: int | list[int] = 0, seed: int = 0
) -> str:
    """The digest that ``chain`` or ``diamond`` must return for these inputs, computed here."""
    stages = CHAIN_STAGES if workflow_name == "chain" else DIAMOND_STAGES
    sizes = _for_each(payload_bytes, stages)
    feeders: Mapping[str, tuple[str, ...]] = {
        "second": ("first",),
        "third": ("second",),
        "left": ("split",),
        "right": ("split",),
        "merge": ("left", "right"),
    }
    digests: dict[str, str] = {}
    for name, size in zip(stages, sizes, strict=True):
        received = [digests[feeder] for feeder in feeders.get(name, ())]
        digests[name] = seal(received, name, pattern(seed, name, size))
    return digests[stages[-1]]


@stage(isolation="loop")
async def relay(ctx: StageContext[None], payload: bytes) -> bytes:
    """Pass the bytes on."""
    return payload


@workflow
def noop(payload: bytes = b"") -> bytes:
    """Return the payload after three stages that do nothing."""
    return relay(relay(relay(payload)))


@stage
async def first(
    ctx: StageContext[None],
    seconds: float | list[float],
    payload_bytes: int | list[int],
    steps: int,
    cost: Cost,
    seed: int,
    failure: Failure,
    failing_stage: str,
    first_attempt_only: bool,
) -> Parcel:
    """Begin a chain."""
    task = _task(
        CHAIN_STAGES, seconds, payload_bytes, steps, cost, seed, failure, failing_stage, first_attempt_only
    )
    return await _perform(ctx, "first", task, CHAIN_STAGES)


@stage
async def second(ctx: StageContext[None], parcel: Parcel) -> Parcel:
    """Go on with a chain."""
    _verify(parcel, "first", CHAIN_STAGES)
    return await _perform(ctx, "second", parcel.task, CHAIN_STAGES, parcel)


@stage
async def third(ctx: StageContext[None], parcel: Parcel) -> Outcome:
    """End a chain."""
    _verify(parcel, "second", CHAIN_STAGES)
    return _outcome(await _perform(ctx, "third", parcel.task, CHAIN_STAGES, parcel))


@workflow
def chain(
    seconds: float | list[float] = 0.0,
    payload_bytes: int | list[int] = 0,
    steps: int = 1,
    cost: Cost = "sleep",
    seed: int = 0,
    failure: Failure = "none",
    failing_stage: str = "second",
    first_attempt_only: bool = False,
) -> Outcome:
    """Three stages in a row; ``seconds`` and ``payload_bytes`` are for all of them, or a list of three."""
    begun = first(seconds, payload_bytes, steps, cost, seed, failure, failing_stage, first_attempt_only)
    return third(second(begun))


@stage
async def split(
    ctx: StageContext[None],
    seconds: float | list[float],
    payload_bytes: int | list[int],
    steps: int,
    cost: Cost,
    seed: int,
    failure: Failure,
    failing_stage: str,
    first_attempt_only: bool,
) -> Parcel:
    """Begin a diamond."""
    task = _task(
        DIAMOND_STAGES, seconds, payload_bytes, steps, cost, seed, failure, failing_stage, first_attempt_only
    )
    return await _perform(ctx, "split", task, DIAMOND_STAGES)


@stage
async def left(ctx: StageContext[None], parcel: Parcel) -> Parcel:
    """One side of a diamond."""
    _verify(parcel, "split", DIAMOND_STAGES)
    return await _perform(ctx, "left", parcel.task, DIAMOND_STAGES, parcel)


@stage
async def right(ctx: StageContext[None], parcel: Parcel) -> Parcel:
    """The other side of a diamond."""
    _verify(parcel, "split", DIAMOND_STAGES)
    return await _perform(ctx, "right", parcel.task, DIAMOND_STAGES, parcel)


@stage
async def merge(ctx: StageContext[None], one: Parcel, other: Parcel) -> Outcome:
    """End a diamond: both parcels must be of the same request."""
    _verify(one, "left", DIAMOND_STAGES)
    _verify(other, "right", DIAMOND_STAGES)
    if one.task != other.task:
        raise ValueError(f"the parcels of two requests were joined: {one.task} and {other.task}")
    return _outcome(await _perform(ctx, "merge", one.task, DIAMOND_STAGES, one, other))


@workflow
def diamond(
    seconds: float | list[float] = 0.0,
    payload_bytes: int | list[int] = 0,
    steps: int = 1,
    cost: Cost = "sleep",
    seed: int = 0,
    failure: Failure = "none",
    failing_stage: str = "left",
    first_attempt_only: bool = False,
) -> Outcome:
    """Four stages with a join; ``seconds`` and ``payload_bytes`` are for all of them, or a list of four."""
    parcel = split(seconds, payload_bytes, steps, cost, seed, failure, failing_stage, first_attempt_only)
    return merge(left(parcel), right(parcel))


def _sha256(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:" % len(part))  # so that no two lists of parts give the same text
        digest.update(part)
    return digest.digest()


def _for_each(given: Any, stages: Sequence[str]) -> tuple[Any, ...]:
    """One number for all stages, or one for each."""
    listed = given if isinstance(given, list) else [given] * len(stages)
    if len(listed) != len(stages):
        raise ValueError(f"{len(listed)} numbers for the {len(stages)} stages {', '.join(stages)}")
    return tuple(listed)


def _task(
    stages: Sequence[str],
    seconds: float | list[float],
    payload_bytes: int | list[int],
    steps: int,
    cost: Cost,
    seed: int,
    failure: Failure,
    failing_stage: str,
    first_attempt_only: bool,
) -> Task:
    """The request's task; raises ``ValueError`` for what the types alone let through."""
    durations = _for_each(seconds, stages)
    sizes = _for_each(payload_bytes, stages)
    if not all(0 <= each <= 24 * 3600 for each in durations):
        raise ValueError(f"seconds are {seconds!r}; each must be from 0 to a day")
    if not all(0 <= each <= PAYLOAD_BYTES_MAX for each in sizes):
        raise ValueError(f"payload_bytes are {payload_bytes!r}; each must be from 0 to {PAYLOAD_BYTES_MAX}")
    if not 1 <= steps <= 100_000:
        raise ValueError(f"steps is {steps}; it must be from 1 to 100000")
    if failing_stage not in stages:
        raise ValueError(f"failing_stage is {failing_stage!r}; the stages are {', '.join(stages)}")
    return Task(
        tuple(map(float, durations)), sizes, steps, cost, seed, failure, failing_stage, first_attempt_only
    )


def _verify(parcel: Parcel, sender: str, stages: Sequence[str]) -> None:
    """Every byte must be the one that ``sender`` was to send."""
    if parcel.sender != sender:
        raise ValueError(f"a parcel of {parcel.sender!r} arrived where {sender!r} sends")
    size = parcel.task.payload_bytes[stages.index(sender)]
    wanted = pattern(parcel.task.seed, sender, size)
    if parcel.payload.shape != wanted.shape:
        raise ValueError(f"{parcel.payload.shape} bytes arrived from {sender!r} where {size} were sent")
    wrong = np.flatnonzero(parcel.payload != wanted)
    if wrong.size:
        raise ValueError(f"{wrong.size} of {size} bytes from {sender!r} are damaged, first at {wrong[0]}")


async def _perform(
    ctx: StageContext[None], name: str, task: Task, stages: Sequence[str], *received: Parcel
) -> Parcel:
    """Do a stage's work, fail if that is asked for, and make its parcel."""
    place = stages.index(name)
    await ctx.run(_spend, ctx, task.seconds[place], task.steps, task.cost)
    is_failing = name == task.failing_stage and (ctx.attempt == 1 or not task.first_attempt_only)
    if is_failing and task.failure == "wrong_type":
        return {"failure": "wrong_type"}  # type: ignore[return-value]  # the failure that is asked for
    if is_failing and task.failure != "none":
        await _fail(task.failure, name)
    payload = pattern(task.seed, name, task.payload_bytes[place])
    digest = seal([parcel.digest for parcel in received], name, payload)
    return Parcel(task, name, payload, digest)


def _spend(ctx: StageContext[None], seconds: float, steps: int, cost: Cost) -> None:
    """Take the time, in steps that are reported; stops where ``report`` raises."""
    for step in range(1, steps + 1):
        if cost == "sleep":
            time.sleep(seconds / steps)
        else:
            _spin(time.perf_counter() + seconds / steps)
        ctx.report(step=step, total=steps)


def _spin(until: float) -> None:
    while time.perf_counter() < until:
        pass


async def _fail(failure: Failure, name: str) -> NoReturn:
    match failure:
        case "exit":
            sys.exit(1)
        case "interrupt":
            raise KeyboardInterrupt
        case "memory":
            raise MemoryError(f"stage {name!r} was asked to run out of memory")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            await anyio.sleep_forever()
        case "block":
            time.sleep(_BLOCK_SECONDS)  # noqa: ASYNC251 - blocking is what is asked for
    raise RuntimeError(f"stage {name!r} was asked to fail")


def _outcome(parcel: Parcel) -> Outcome:
    return Outcome(parcel.digest, parcel.payload)
