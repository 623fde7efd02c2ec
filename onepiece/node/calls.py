"""Questions to other nodes and their answers: control messages matched by a number."""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from onepiece.errors import NodeUnreachable
from onepiece.node.control import ControlService
from onepiece.runtime.environment import Environment


class Answer(Protocol):
    """A message that answers the call of this number."""

    @property
    def call(self) -> int:
        """The number of the question."""
        ...


_AnswerT = TypeVar("_AnswerT", bound=Answer)


class Calls:
    """The questions of one part of a node that are not answered yet."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    def answered_by(self, control: ControlService, *kinds: type[Answer]) -> None:
        """Receive these messages as answers."""
        for kind in kinds:
            control.on(kind, self._on_answer)

    async def ask(
        self,
        kind: type[_AnswerT],
        send: Callable[[int], object],
        *,
        what: str,
        timeout_seconds: float,
    ) -> _AnswerT:
        """Send a question by ``send(number)`` and wait for its answer.

        Raises ``NodeUnreachable`` if none comes in time; ``what`` names the question in it. An answer
        that comes later, or after the caller was cancelled, is dropped.
        """
        number = next(self._env.call_numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(timeout_seconds):
                sent = send(number)
                if asyncio.iscoroutine(sent):
                    await sent
                found = await answer
        except TimeoutError:
            raise NodeUnreachable(f"{what}: no answer within {timeout_seconds:.0f} s") from None
        finally:
            del self._waiting[number]
        assert isinstance(found, kind), f"{what}: answered by {type(found).__name__}"
        return found

    def _on_answer(self, answer: Answer) -> None:
        waiting = self._waiting.get(answer.call)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)
