"""Retries: when a stage that failed to load may be tried again, and when to give up.

Failures are counted per stage and in a row. The pause doubles with each, up to a bound; after
``attempts_max`` failures the stage is given up until that is forgiven (a worker joins, the workflows
change): repeating what failed three times alike costs a load each time and hides the
reason.
"""

from collections.abc import Mapping
from typing import Final

from attrs import evolve, frozen

_NODES_MAX: Final = 16


@frozen
class Trouble:
    """A stage's failures in a row."""

    reason: str
    """The last failure."""
    failures: int
    nodes: tuple[str, ...]
    """Where it failed lately, once for each failure: nodes to avoid."""
    retry_at: float | None
    """None: the pause is over, or it is given up."""

    def is_due(self, now: float) -> bool:
        """The pause has just ended."""
        return self.retry_at is not None and now >= self.retry_at

    def with_pause_over(self) -> "Trouble":
        """The same after the pause."""
        return evolve(self, retry_at=None)

    def forgiven(self) -> "Trouble":
        """It may be tried as often as at first; the nodes where it failed are still avoided."""
        return evolve(self, failures=0, retry_at=None)


@frozen
class RetryPolicy:
    """How often and how soon; see the module's text."""

    attempts_max: int = 3
    pause_seconds: float = 1.0
    pause_seconds_max: float = 30.0

    def __attrs_post_init__(self) -> None:
        assert self.attempts_max >= 1
        assert 0 < self.pause_seconds <= self.pause_seconds_max

    def after_failure(self, earlier: Trouble | None, reason: str, node_id: str, now: float) -> Trouble:
        """The record after one more failure; ``earlier`` is None for the first in a row."""
        nodes = (*(() if earlier is None else earlier.nodes), node_id)[-_NODES_MAX:]
        failures = 1 if earlier is None else earlier.failures + 1
        pause = min(self.pause_seconds * 2.0 ** (failures - 1), self.pause_seconds_max)
        retry_at = None if failures >= self.attempts_max else now + pause
        return Trouble(reason, failures, nodes, retry_at)

    def is_given_up(self, trouble: Trouble) -> bool:
        """No further try is made."""
        return trouble.failures >= self.attempts_max

    def is_held_back(self, trouble: Trouble | None) -> bool:
        """No try is made now."""
        return trouble is not None and (trouble.retry_at is not None or self.is_given_up(trouble))

    def describe(self, trouble: Trouble) -> str:
        """The record in words."""
        times = trouble.failures
        often = "" if times == 1 else f" {times} times in a row"
        after = "given up" if self.is_given_up(trouble) else "it will be tried again"
        return f"failed{often}, {after}: {trouble.reason}"


def failures_by_node(troubles: Mapping[str, Trouble]) -> dict[tuple[str, str], int]:
    """How often each stage failed lately on each node, by (stage, node id)."""
    return {
        (stage, node_id): trouble.nodes.count(node_id)
        for stage, trouble in troubles.items()
        for node_id in trouble.nodes
    }
