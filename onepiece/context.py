"""What a stage's code is given beside its inputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from onepiece._torch import Group

State_co = TypeVar("State_co", covariant=True)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class StageContext(ABC, Generic[State_co]):
    """One attempt at one stage of one request; the first argument of every stage.

    A stage's ``setup`` receives one, too: there ``state`` is None, ``uid`` is empty, and neither a
    deadline nor a cancellation exists.
    """

    uid: str
    """The request's UID."""
    stage: str
    """The node of the workflow's graph that runs: ``denoise``, ``denoise_2``."""
    node: str
    """The name of the node process it runs in."""
    attempt: int
    """1, and more when the stage runs again because a node was lost."""
    device: str
    """``cpu``, ``cuda:0``; tensors among the inputs lie there."""
    deadline_at: float | None
    """The request's deadline in wall-clock seconds since the epoch, or None."""
    log: "FilteringBoundLogger"
    """Logs with the request's UID, stage and node."""
    rank: int
    """Which of the instance's processes this is, from 0; 0 for a stage on one device."""
    world_size: int
    """How many there are: ``count`` of the stage's resources."""

    @property
    @abstractmethod
    def state(self) -> State_co:
        """What the stage's ``setup`` yielded on this device."""

    @property
    @abstractmethod
    def group(self) -> "Group":
        """The ``torch.distributed`` group of the instance's ranks, its default group; None on one device.

        The first time it blocks until every rank has asked for it, and imports torch. In ``setup`` it also
        lets the next rank of the node begin its own: load the weights first, then ask.

        Raises:
            ConfigError: torch is not installed, or lacks what the device needs.
        """

    @property
    @abstractmethod
    def deadline(self) -> float | None:
        """Seconds that remain until the deadline, by the monotonic clock; None if there is none."""

    @property
    @abstractmethod
    def cancelled(self) -> bool:
        """Whether somebody cancelled the request; ``report`` raises then."""

    @abstractmethod
    def report(
        self,
        *,
        step: int | None = None,
        total: int | None = None,
        preview: bytes | None = None,
        **fields: Any,
    ) -> None:
        """Tell the client how far the stage is; and learn here that it should stop.

        Call it once a step, from any thread. It never waits: a newer report replaces one that has not
        been sent yet.

        Args:
            step: Steps done.
            total: Steps in all.
            preview: An intermediate result to show, for example a PNG.
            **fields: More for the client; plain values only (None, bool, int, float, str, bytes, lists and
                dicts of these; tuples arrive as lists), of ``REPORT_BYTES_MAX`` bytes at most in all.
                ``content_type`` is the preview's.

        Raises:
            CodecError: A field is no plain value, or they are too much; it is named. Nothing was reported.
            ValueError: The preview is larger than ``PREVIEW_BYTES_MAX``.
            RequestCancelled: Somebody cancelled the request. Let it pass through.
            DeadlineExceeded: The deadline is over. Let it pass through.
        """

    @abstractmethod
    async def run(
        self, function: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run blocking code in the device's thread, so that this stage's event loop stays free.

        Args:
            function: What to call.
            *args: Its arguments, as they are: nothing is copied.
            **kwargs: The same.

        Returns:
            What the function returns; what it raises is raised here.

        A cancelled caller waits until the function has returned: a thread cannot be interrupted. Let
        the function call ``report`` now and then, which raises in it.
        """
