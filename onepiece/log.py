"""The owner of structlog: events with fields, as ``key=value`` lines for people or JSON for machines."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from onepiece._bounded import text_of, trace_of
from onepiece._repetitions import Repetitions
from onepiece.errors import ConfigError
from onepiece.limits import LOG_TEXT_BYTES_MAX

Format = Literal["text", "json"]

_chosen: tuple[Format, str] = ("text", "info")

_LEVELS: Final = ("debug", "info", "warning", "error")


def configure(format: Format = "text", level: str = "info", stream: TextIO | None = None) -> None:  # noqa: A002 - the option's name
    """Set up logging for a process; call it once, where the process starts.

    Args:
        format: ``"text"`` for ``at=... level=info event=... uid=...``, ``"json"`` for one object a line.
        level: The least level that is written: debug, info, warning or error.
        stream: Where to; standard error if None.

    Raises:
        ConfigError: There is no such format or level.
    """
    if level not in _LEVELS:
        raise ConfigError(f"log level {level!r} does not exist; choose from {', '.join(_LEVELS)}")
    renderers: dict[str, Processor] = {
        "text": structlog.processors.LogfmtRenderer(key_order=["at", "level", "event"], bool_as_flag=False),
        "json": structlog.processors.JSONRenderer(),
    }
    if format not in renderers:
        raise ConfigError(f"log format {format!r} does not exist; choose from {', '.join(renderers)}")
    global _chosen  # noqa: PLW0603 - logging is set up once for the process, like structlog itself
    _chosen = (format, level)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
            _exception,
            _one_line,
            renderers[format],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Unfailing(stream or sys.stderr))),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    if not any(isinstance(handler, _Forward) for handler in root.handlers):
        root.addHandler(_Forward())
    # What libraries find worth an info, each request of a client for example, is for developers.
    root.setLevel("WARNING" if level == "info" else level.upper())


class _Unfailing:
    """A stream whose reader may go, or whose disk may fill up: events are lost then, and the work goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write as far as that is possible."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        """Flush as far as that is possible."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


class _Forward(logging.Handler):
    """Brings what libraries say through the standard library's logging into the same stream and form.

    What they say again and again, as asyncio does while a process is out of file descriptors, is written
    ever less often: thousands of equal lines a second fill a disk, and hide the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self._repetitions = Repetitions()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            fields: dict[str, Any] = {"source": record.name, "message": record.getMessage()}
            place = f"{record.name}:{record.lineno}"
            left_out = self._repetitions.worth_saying(place, fields["message"], time.monotonic())
            if left_out is None:
                return
            if left_out:
                fields["left_out"] = left_out
            get_logger().log(record.levelno, "library_said", exc_info=record.exc_info, **fields)
        except Exception:  # noqa: BLE001 - the standard library's own way with what cannot be logged
            self.handleError(record)


def chosen() -> tuple[Format, str]:
    """Format and level as they were last set up, for a process that is to write the same."""
    return _chosen


@contextmanager
def captured(take: Callable[[Mapping[str, Any]], None], level: str = "info") -> Iterator[None]:
    """Hand every event to ``take`` instead of writing it, within the block; for tests and simulations.

    An event is a mapping of its fields, with ``level``, ``event`` and, of an error, ``exception``.
    """

    def hand_over(_logger: Any, _method: str, event: Any) -> Any:
        take(event)
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[structlog.processors.add_log_level, _exception, hand_over],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def get_logger(**fields: Any) -> FilteringBoundLogger:
    """A logger whose every event carries ``fields``: ``get_logger(node=..., stage=...)``."""
    logger: FilteringBoundLogger = structlog.get_logger(**fields)
    return logger


def _one_line(_logger: Any, _method: str, event: Any) -> Any:
    """``key=value`` holds scalars; what is more becomes its text, and a text has a bound."""
    return {
        key: value if isinstance(value, int | float | bool | None) else text_of(value, LOG_TEXT_BYTES_MAX)
        for key, value in event.items()
    }


def _exception(_logger: Any, _method: str, event: Any) -> Any:
    """The traceback of ``exc_info``, which anybody's error may keep from being formatted."""
    error = event.pop("exc_info", None)
    if isinstance(error, tuple):  # as the standard library's logging has it
        error = error[1]
    elif error and not isinstance(error, BaseException):
        error = sys.exc_info()[1]
    if isinstance(error, BaseException):
        event["exception"] = trace_of(error, LOG_TEXT_BYTES_MAX)
    return event
