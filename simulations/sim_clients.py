"""The clients of the simulated cluster, and what they were told.

A client submits with a key as long as nobody has answered, at any proxy; follows its request at any
proxy, as one that has only the UID would; cancels some; and fetches the result. Each request asks for
its own payload, so a result that is another's, or damaged, has another digest.
"""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any, Final

from attrs import define, evolve, field, frozen

from onepiece.codec import value_from_bytes
from onepiece.errors import (
    DeadlineExceeded,
    NotReady,
    OnePieceError,
    OwnedElsewhere,
    Rejected,
    RequestCancelled,
    ResultGone,
    StageFailed,
    UnknownRequest,
)
from onepiece.node.proxy_service import ProxyService
from onepiece.requests import RequestState, RequestStatus
from simulations.loop import VirtualLoop
from simulations.sim_machine import SimMachine, Unreachable
from simulations.sim_stages import Failure, expected
from simulations.sim_trace import Trace

CALL_SECONDS: Final = 15.0
SUBMIT_PATIENCE_SECONDS: Final = 60.0
LONG_SECONDS: Final = 600.0
"""The deadline of requests that are not to meet it: beyond the end of any run."""


@frozen
class Wish:
    """A request as its client wants it."""

    number: int
    at: float
    workflow: str
    payload_bytes: int
    seconds: float
    failure: Failure
    failing_stage: str
    timeout_seconds: float
    key: str | None
    cancel_after: float | None

    @classmethod
    def draw(cls, number: int, rng: Random, load_seconds: float, poison: float) -> "Wish":
        """One of many."""
        workflow = rng.choice(("line", "diamond"))
        stages = {"line": ("begin", "middle", "finish"), "diamond": ("split", "left", "right", "merge")}
        failure: Failure = rng.choices(("none", "raise", "kill"), (0.93 - poison, 0.07, poison))[0]
        return cls(
            number=number,
            at=rng.random() * load_seconds,
            workflow=workflow,
            payload_bytes=rng.choice((0, 100, 5000, 50_000)),
            seconds=rng.choice((0.0, 0.1, 1.0, 4.0)),
            failure=failure,
            failing_stage=rng.choice(stages[workflow]),
            timeout_seconds=rng.choices((LONG_SECONDS, 3.0), (0.85, 0.15))[0],
            key=f"key-{number}" if rng.random() < 0.8 else None,
            cancel_after=rng.random() * 6.0 if rng.random() < 0.12 else None,
        )

    def shifted(self, load_seconds: float) -> "Wish":
        """The same where all is a line in the first half, and a diamond in the second, and takes its time."""
        is_line = self.at < load_seconds / 2
        failing_stage = ("middle" if is_line else "left") if self.failure != "none" else self.failing_stage
        return evolve(
            self,
            workflow="line" if is_line else "diamond",
            failing_stage=failing_stage,
            seconds=0.3 if self.seconds else 0.0,
        )

    def inputs(self) -> dict[str, Any]:
        """What is submitted."""
        return {
            "seed": self.number,
            "seconds": self.seconds,
            "payload_bytes": self.payload_bytes,
            "failure": self.failure,
            "failing_stage": self.failing_stage,
        }

    @property
    def digest(self) -> str:
        """What must come out."""
        return expected(self.workflow, self.number, self.payload_bytes)


@frozen
class Ending:
    """How a request ended, as somebody was told: the digest of its result, or the name of its error."""

    what: str
    is_result: bool

    def __str__(self) -> str:
        return self.what


@define(eq=False)
class Request:
    """A wish, and what has become of it."""

    wish: Wish
    uid: str | None = None
    accepted_at: float | None = None
    was_cancelled: bool = False
    """Its client has asked for that."""
    endings: dict[Ending, str] = field(factory=dict)
    """What was told, and by whom first."""
    doing: str = "waits for its time"
    messages: dict[str, None] = field(factory=dict)
    """Of the errors it is said to have ended in."""
    ended_at: float | None = None


class Clients:
    """All clients of a run.

    Args:
        machines: Those with a proxy.
    """

    def __init__(self, loop: VirtualLoop, machines: Sequence[SimMachine], rng: Random, trace: Trace) -> None:
        self._loop = loop
        self._machines = {machine.name: machine for machine in machines}
        self._rng = rng
        self._trace = trace
        self.requests: list[Request] = []
        self._by_uid: dict[str, Request] = {}

    def request_of(self, uid: str) -> Request | None:
        """The request that a UID was given to, as far as its client was told."""
        return self._by_uid.get(uid)

    async def run(self, wishes: Sequence[Wish]) -> None:
        """Be all clients, until each was told how its request ended or has given up submitting it."""
        self.requests = [Request(wish) for wish in wishes]
        async with asyncio.TaskGroup() as tasks:
            for request in self.requests:
                tasks.create_task(self._be(request), name=f"client {request.wish.number}")

    async def _be(self, request: Request) -> None:
        await asyncio.sleep(request.wish.at)
        await self._submit(request)
        if request.uid is None:
            return
        if request.wish.cancel_after is None:
            await self._follow(request)
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(request))
            tasks.create_task(self._cancel(request, request.wish.cancel_after))

    def _any(self) -> SimMachine:
        names = list(self._machines)
        return self._machines[self._rng.choice(names)]

    # --- submitting ----------------------------------------------------------------------------

    async def _submit(self, request: Request) -> None:
        wish = request.wish

        async def submit(proxy: ProxyService) -> RequestStatus:
            return await proxy.submit(
                wish.workflow, wish.inputs(), timeout_seconds=wish.timeout_seconds, key=wish.key
            )

        give_up_at = self._loop.now + SUBMIT_PATIENCE_SECONDS
        while self._loop.now < give_up_at:
            machine = self._any()
            request.doing = f"submits at {machine.name}"
            try:
                status = await machine.call(submit, CALL_SECONDS)
            except Unreachable as error:
                self._tell(request, f"{machine.name}: {error}")
                if wish.key is None:
                    request.doing = "does not know whether it was accepted, and has no key"
                    return
            except Rejected as error:
                self._tell(request, f"is refused by {machine.name}: {error.message}")
            except OnePieceError as error:
                self._tell(request, f"is refused by {machine.name}: {type(error).__name__}: {error.message}")
            else:
                self._accepted(request, status, machine)
                return
            await asyncio.sleep(0.2 + self._rng.random())
        request.doing = "has given up submitting"

    def _accepted(self, request: Request, status: RequestStatus, machine: SimMachine) -> None:
        self._tell(request, f"is accepted by {machine.name} as {status.uid}")
        request.uid, request.accepted_at = status.uid, self._loop.now
        known = self._by_uid.setdefault(status.uid, request)
        if known is not request:
            self._trace.fail(f"requests {known.wish.number} and {request.wish.number} are both {status.uid}")
        if status.workflow != request.wish.workflow:
            self._trace.fail(f"{status.uid} was submitted as {request.wish.workflow}, is {status.workflow}")

    # --- following -----------------------------------------------------------------------------

    async def _follow(self, request: Request) -> None:
        machine = self._any()
        while not request.endings:
            request.doing = f"asks {machine.name} for {request.uid}"
            ending, machine = await self._look(request, machine)
            if ending is not None:
                self.note(request, ending, machine.name)
                return
            await asyncio.sleep(0.5 + self._rng.random())

    async def _look(self, request: Request, machine: SimMachine) -> tuple[Ending | None, SimMachine]:
        """What this machine says of the request, and whom to ask next."""
        try:
            return await self.ask(request, machine), machine
        except OwnedElsewhere as error:
            owner = str(error.fields["http"]).removeprefix("http://").partition(":")[0]
            return None, self._machines[owner]
        except (NotReady, UnknownRequest, Unreachable) as error:
            request.doing = f"was told by {machine.name}: {error}"
        return None, self._any()

    async def ask(self, request: Request, machine: SimMachine) -> Ending | None:
        """How the request ended, as this machine has it; None if it has not.

        Raises:
            OwnedElsewhere, NotReady, UnknownRequest, Unreachable: it cannot say.
        """
        uid = request.uid
        assert uid is not None, "it was accepted"

        async def look(proxy: ProxyService) -> RequestStatus:
            return await proxy.status(uid)

        async def fetch(proxy: ProxyService) -> bytes:
            result = await proxy.result(uid)
            return b"".join([piece async for piece in result.read(0, result.total_bytes)])

        try:
            status = await machine.call(look, CALL_SECONDS)
            if status.error is not None:
                request.messages[f"{status.error['error']}: {status.error.get('message')}"] = None
                return Ending(str(status.error["error"]), is_result=False)
            if status.state is not RequestState.FINISHED:
                return None
            value = value_from_bytes(await machine.call(fetch, CALL_SECONDS))
        except ResultGone:
            return Ending("gone", is_result=True)
        except (DeadlineExceeded, RequestCancelled, StageFailed) as error:  # another end stands by now
            return Ending(type(error).__name__, is_result=False)
        return Ending(str(value), is_result=True)

    def note(self, request: Request, ending: Ending, who: str) -> None:
        """Somebody was told how a request ended; whoever is told must be told the same."""
        if ending in request.endings:
            return
        self._tell(request, f"has ended, says {who}: {ending} {'; '.join(request.messages)}"[:300])
        request.endings[ending] = f"{who} at {self._loop.now:.3f}"
        request.ended_at = request.ended_at or self._loop.now
        if len(request.endings) > 1:
            told = ", ".join(f"{what} (by {by})" for what, by in request.endings.items())
            self._trace.fail(f"{request.uid} has ended twice: {told}")
        if ending.is_result and ending.what != request.wish.digest:
            self._trace.fail(f"the result of {request.uid} is {ending}, and must be {request.wish.digest}")

    async def _cancel(self, request: Request, after: float) -> None:
        await asyncio.sleep(after)
        uid = request.uid
        assert uid is not None, "it was accepted"

        async def cancel(proxy: ProxyService) -> RequestStatus:
            return await proxy.cancel(uid)

        while not request.endings:
            request.was_cancelled = True
            machine = self._any()
            try:
                await machine.call(cancel, CALL_SECONDS)
            except (OnePieceError, Unreachable):
                await asyncio.sleep(self._rng.random())
            else:
                self._tell(request, f"is cancelled at {machine.name}")
                return

    def _tell(self, request: Request, what: str) -> None:
        self._trace.tell("client", f"{request.wish.number} ({request.uid}) {what}")
