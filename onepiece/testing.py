"""For unit tests of stages: a context without a node around it.

::

    async def test_shout_is_loud() -> None:
        assert await shout.function(stage_context(), "ahoy") == "AHOY!"
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

import anyio.to_thread
from attrs import define, field

from onepiece.context import Arguments, Result, StageContext
from onepiece.errors import DeadlineExceeded, RequestCancelled
from onepiece.log import get_logger
from onepiece.reporting import preview_of, reportable

State = TypeVar("State")


@define
class RecordingContext(StageContext[State]):
    """A ``StageContext`` that keeps what the stage reported, and can be cancelled."""

    _state: State
    device: str
    deadline_at: float | None = None
    uid: str = "00000000000000000000000000"
    stage: str = "stage"
    node: str = "test"
    attempt: int = 1
    log: Any = field(factory=lambda: get_logger(stage="stage"))
    rank: int = 0
    world_size: int = 1
    reports: list[dict[str, Any]] = field(factory=list)
    """What each call of ``report`` was given, without what was left out."""
    _cancelled: bool = False

    @property
    def state(self) -> State:
        """The state given to ``stage_context``."""
        return self._state

    @property
    def group(self) -> None:
        """None, as on one device."""
        return

    @property
    def deadline(self) -> float | None:
        """Seconds until ``deadline_at``."""
        return None if self.deadline_at is None else self.deadline_at - time.time()

    @property
    def cancelled(self) -> bool:
        """Whether the test called ``cancel``."""
        return self._cancelled

    def cancel(self) -> None:
        """Cancel the request: the next ``report`` raises."""
        self._cancelled = True

    def report(
        self,
        *,
        step: int | None = None,
        total: int | None = None,
        preview: bytes | None = None,
        **fields: Any,
    ) -> None:
        """Keep the report; raise as the real one does."""
        if self._cancelled:
            raise RequestCancelled(f"request {self.uid} was cancelled", uid=self.uid)
        remaining = self.deadline
        if remaining is not None and remaining <= 0:
            raise DeadlineExceeded(f"the deadline of request {self.uid} is over", uid=self.uid)
        given = {"step": step, "total": total, **fields}
        kept = reportable({name: value for name, value in given.items() if value is not None})
        self.reports.append(kept if preview is None else kept | {"preview": preview_of(preview)})

    async def run(
        self, function: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run the function in a worker thread."""
        return await anyio.to_thread.run_sync(lambda: function(*args, **kwargs))


@overload
def stage_context(
    state: None = ..., device: str = ..., *, timeout: float | None = ...
) -> RecordingContext[None]: ...


@overload
def stage_context(
    state: State, device: str = ..., *, timeout: float | None = ...
) -> RecordingContext[State]: ...


def stage_context(
    state: Any = None, device: str = "cpu", *, timeout: float | None = None
) -> RecordingContext[Any]:
    """Make a context to call a stage with.

    Args:
        state: What the stage's ``setup`` would have yielded.
        device: Where its tensors are to lie.
        timeout: Seconds until the request's deadline; none if None.

    Returns:
        A context with ``reports`` and ``cancel()`` beside what stages see.
    """
    return RecordingContext(state, device, None if timeout is None else time.time() + timeout)
