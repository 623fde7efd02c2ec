"""A stream of requests, each followed to its end by a client that knows all proxies.

Every result is checked byte by byte. Then each proxy is asked by itself how the request ended, and when
all faults are over each key is submitted once more: it must stand for the same request still.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, Final

import numpy as np
from attrs import define, field

import onepiece
from onepiece.client import Client, RequestHandle
from onepiece.errors import (
    NodeUnreachable,
    NotReady,
    OnePieceError,
    Overloaded,
    RequestFailed,
    ResultGone,
    UnknownRequest,
)
from simulations.chaos.ledger import FINISHED, Happening, Submission
from simulations.chaos.processes import ChaosNode
from stages import synthetic

WORKFLOW: Final = "diamond"
PAUSE_SECONDS: Final = 0.2
_TRANSIENT: Final = (NotReady, Overloaded, NodeUnreachable)


@define
class Load:
    """What the stream is made of."""

    rate: float
    """Requests per second."""
    in_flight_max: int
    stage_seconds: float
    payload_bytes: int
    timeout_seconds: float
    patience_seconds: float
    """How long after its deadline a request's end may be out of reach before it is lost."""


@define(eq=False)
class Stream:
    """Submits requests and writes down what becomes of them."""

    client: Client
    """Of all proxies."""
    proxies: Mapping[str, Client]
    """A client of each proxy alone."""
    load: Load
    rng: random.Random
    submissions: list[Submission] = field(factory=list)

    async def run(self, stop: asyncio.Event) -> None:
        """Submit until told to stop, and return when every request has ended or is lost."""
        room = asyncio.Semaphore(self.load.in_flight_max)
        async with asyncio.TaskGroup() as tasks:
            while not stop.is_set():
                await room.acquire()
                seed = len(self.submissions)
                submission = Submission(f"chaos-{self.rng.getrandbits(64):016x}", seed)
                self.submissions.append(submission)
                task = tasks.create_task(self._follow(submission, self.rng.random() < 0.5))
                task.add_done_callback(lambda _: room.release())
                await asyncio.sleep(self.rng.expovariate(self.load.rate))

    def _inputs(self, submission: Submission) -> dict[str, Any]:
        return {
            "seconds": self.load.stage_seconds,
            "payload_bytes": self.load.payload_bytes,
            "seed": submission.seed,
        }

    async def _submit(self, submission: Submission, client: Client) -> RequestHandle[Any]:
        return await client.submit(
            WORKFLOW, self._inputs(submission), timeout=self.load.timeout_seconds, key=submission.key
        )

    async def _follow(self, submission: Submission, drops: bool) -> None:
        submission.submitted_at = time.time()
        give_up_at = time.monotonic() + self.load.timeout_seconds + self.load.patience_seconds
        handle: RequestHandle[Any] | None = None
        while time.monotonic() < give_up_at:
            try:
                if handle is None:
                    handle = await self._submit(submission, self.client)
                    submission.uid = handle.uid
                await self._collect_events(handle, submission)
                value = await handle.result(keep=True)
            except (*_TRANSIENT, UnknownRequest) as error:
                if isinstance(error, UnknownRequest):
                    submission.trouble.append(f"{error}")
                submission.refusals += handle is None
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            except (RequestFailed, ResultGone) as error:
                submission.end = type(error).__name__
                submission.trouble.append(f"{error}")
                break
            submission.end = FINISHED
            self._check(submission, value)
            break
        submission.ended_at = time.time()
        if handle is None or submission.end is None:
            return
        for name, proxy in self.proxies.items():
            await self._compare(submission, name, proxy)
        if drops and submission.end == FINISHED:
            await handle.drop()

    async def _collect_events(self, handle: RequestHandle[Any], submission: Submission) -> None:
        async with aclosing(handle.events()) as events:
            async for event in events:
                happening = Happening(event.kind.value, event.stage, event.node, event.at)
                if happening not in submission.events:
                    submission.events.append(happening)

    def _check(self, submission: Submission, outcome: Any) -> None:
        size, seed = self.load.payload_bytes, submission.seed
        wanted = synthetic.pattern(seed, synthetic.DIAMOND_STAGES[-1], size)
        digest, payload = _parts(outcome)
        is_right = digest == synthetic.expected_digest("diamond", size, seed) and np.array_equal(
            payload, wanted
        )
        submission.is_corrupt |= not is_right

    async def _compare(self, submission: Submission, name: str, proxy: Client) -> None:
        """What one proxy says of the end; one that does not answer now says nothing."""
        assert submission.uid is not None
        try:
            value = await proxy.attach(submission.uid).result(keep=True)
        except (*_TRANSIENT, UnknownRequest, ResultGone):
            return
        except OnePieceError as error:
            told = type(error).__name__
        else:
            told = FINISHED
            self._check(submission, value)
        submission.other_ends.add(told)
        if told != submission.end:
            submission.trouble.append(f"it is {submission.end}, and {name} says {told}")

    async def confirm(self, seconds: float) -> None:
        """Submit every key again: it must stand for the request that it stood for."""
        give_up_at = time.monotonic() + seconds
        for submission in self.submissions:
            if submission.uid is None:
                continue
            again = await self._confirmed_uid(submission, give_up_at)
            if again != submission.uid:
                submission.other_ends.add(f"another request, {again}")
                submission.trouble.append(f"its key {submission.key} stands for {again} now")

    async def _confirmed_uid(self, submission: Submission, give_up_at: float) -> str:
        while True:
            try:
                return (await self._submit(submission, self.client)).uid
            except _TRANSIENT as error:
                if time.monotonic() > give_up_at:
                    return f"{error}"
                await asyncio.sleep(PAUSE_SECONDS)


def _parts(outcome: Any) -> tuple[str, Any]:
    """Digest and payload of the result, which comes as plain values to who has not named its class."""
    if isinstance(outcome, Mapping):
        return str(outcome["digest"]), outcome["payload"]
    return outcome.digest, outcome.payload


async def connected(
    stack: AsyncExitStack, nodes: Sequence[ChaosNode], seconds: float
) -> tuple[Client, dict[str, Client]]:
    """A client of all proxies, and one of each by its node's name; when all are ready.

    Args:
        stack: Closes them.
        nodes: The set, of which some are proxies.
        seconds: How long each of them may take to be ready.
    """
    proxies = {
        node.name: await stack.enter_async_context(onepiece.connect(node.http))
        for node in nodes
        if "proxy" in node.roles
    }
    for each in proxies.values():
        await each.wait_ready(seconds)
    urls = ",".join(each.url for each in proxies.values())
    return await stack.enter_async_context(onepiece.connect(urls)), proxies
