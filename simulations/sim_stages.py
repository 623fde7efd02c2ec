r"""Workflows for the simulated cluster: they take virtual time and check every byte they are given.

::

    line      begin -> middle -> finish
    diamond           /-> left --\
              split -<            >- merge
                      \-> right -/
"""

import asyncio
import hashlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, Literal, NoReturn

from attrs import frozen

from onepiece import StageContext, StageFailed, stage, workflow

Failure = Literal["none", "raise", "kill"]

LINE: Final = "simulations.sim_stages:line"
DIAMOND: Final = "simulations.sim_stages:diamond"

KILL: Final[ContextVar[Callable[[], None]]] = ContextVar("kill")
"""Ends the process that a stage runs in, as a stage on bad hardware would."""


@frozen
class Task:
    """What a request asks for; it travels along."""

    seed: int
    seconds: float
    payload_bytes: int
    failure: Failure
    failing_stage: str


@frozen
class Parcel:
    """What one stage sends to the next; ``digest`` is over all that led to it."""

    task: Task
    sender: str
    payload: bytes
    digest: str


def pattern(seed: int, sender: str, payload_bytes: int) -> bytes:
    """The payload that the stage ``sender`` sends in a request with this seed."""
    block = hashlib.blake2b(f"{seed}/{sender}".encode()).digest()
    return (block * (payload_bytes // len(block) + 1))[:payload_bytes]


def seal(received: list[str], sender: str, payload: bytes) -> str:
    """The digest of a stage's output."""
    return hashlib.blake2b("/".join([*received, sender]).encode() + payload, digest_size=16).hexdigest()


def expected(workflow_name: str, seed: int, payload_bytes: int) -> str:
    """The digest that a workflow must return."""
    chain = {
        "line": [["begin"], ["middle"], ["finish"]],
        "diamond": [["split"], ["left", "right"], ["merge"]],
    }
    received: list[str] = []
    for rank in chain[workflow_name]:
        received = [seal(received, name, pattern(seed, name, payload_bytes)) for name in rank]
    return received[0]


@stage(isolation="loop", concurrency=2)
async def begin(
    ctx: StageContext[None], seed: int, seconds: float, payload_bytes: int, failure: str, failing_stage: str
) -> Parcel:
    """Begin a line."""
    return await _work(ctx, "begin", _task(seed, seconds, payload_bytes, failure, failing_stage))


@stage(isolation="loop")
async def middle(ctx: StageContext[None], parcel: Parcel) -> Parcel:
    """Go on with a line."""
    _verify(parcel, "begin")
    return await _work(ctx, "middle", parcel.task, parcel)


@stage(isolation="loop")
async def finish(ctx: StageContext[None], parcel: Parcel) -> str:
    """End a line."""
    _verify(parcel, "middle")
    return (await _work(ctx, "finish", parcel.task, parcel)).digest


@workflow
def line(seed: int, seconds: float, payload_bytes: int, failure: str, failing_stage: str) -> str:
    """Three stages in a row."""
    return finish(middle(begin(seed, seconds, payload_bytes, failure, failing_stage)))


@stage(isolation="loop")
async def split(
    ctx: StageContext[None], seed: int, seconds: float, payload_bytes: int, failure: str, failing_stage: str
) -> Parcel:
    """Begin a diamond."""
    return await _work(ctx, "split", _task(seed, seconds, payload_bytes, failure, failing_stage))


@stage(isolation="loop")
async def left(ctx: StageContext[None], parcel: Parcel) -> Parcel:
    """One side of a diamond."""
    _verify(parcel, "split")
    return await _work(ctx, "left", parcel.task, parcel)


@stage(isolation="loop")
async def right(ctx: StageContext[None], parcel: Parcel) -> Parcel:
    """The other side of a diamond."""
    _verify(parcel, "split")
    return await _work(ctx, "right", parcel.task, parcel)


@stage(isolation="loop")
async def merge(ctx: StageContext[None], one: Parcel, other: Parcel) -> str:
    """End a diamond: both parcels must be of the same request."""
    _verify(one, "left")
    _verify(other, "right")
    if one.task != other.task:
        raise ForeignBytes(f"the parcels of two requests were joined: {one.task} and {other.task}")
    return (await _work(ctx, "merge", one.task, one, other)).digest


@workflow
def diamond(seed: int, seconds: float, payload_bytes: int, failure: str, failing_stage: str) -> str:
    """Four stages with a join."""
    parcel = split(seed, seconds, payload_bytes, failure, failing_stage)
    return merge(left(parcel), right(parcel))


class ForeignBytes(ValueError):  # noqa: N818  # named by what happened, as in onepiece.errors
    """A stage was given what was not sent to it: a broken promise, whatever else happened."""


def _task(seed: int, seconds: float, payload_bytes: int, failure: str, failing_stage: str) -> Task:
    assert failure in {"none", "raise", "kill"}, failure
    return Task(seed, seconds, payload_bytes, failure, failing_stage)  # type: ignore[arg-type]  # looked at


def _verify(parcel: Parcel, sender: str) -> None:
    if parcel.sender != sender:
        raise ForeignBytes(f"a parcel of {parcel.sender!r} arrived where {sender!r} sends")
    if parcel.payload != pattern(parcel.task.seed, sender, parcel.task.payload_bytes):
        raise ForeignBytes(f"the payload from {sender!r} is not the one that was sent")


async def _work(ctx: StageContext[None], name: str, task: Task, *received: Parcel) -> Parcel:
    """Take the time, fail if that is asked for, and make the parcel."""
    for step in range(1, 3):
        await asyncio.sleep(task.seconds / 2)
        ctx.report(step=step, total=2)
    if name == task.failing_stage and task.failure == "raise":
        raise RuntimeError(f"{name} was asked to fail")
    if name == task.failing_stage and task.failure == "kill":
        await _die()
    payload = pattern(task.seed, name, task.payload_bytes)
    return Parcel(task, name, payload, seal([parcel.digest for parcel in received], name, payload))


async def _die() -> NoReturn:
    KILL.get()()
    await asyncio.get_running_loop().create_future()
    raise StageFailed("the process has ended")
