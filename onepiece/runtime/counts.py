"""What seldom happens on a node, counted: for its metrics.

What happens with every message is not counted here; where there is a number of it anyway, metrics read that.
A counter outlives the actors whose events it counts, so that it never goes down while the node lives.
"""

from collections import Counter, defaultdict
from typing import Final

from attrs import define, field

from onepiece.core.inventory import StageWork

PEER_LOST: Final = "peer_lost"
"""The node it was sent to was lost before it had taken it."""
ASKED: Final = "asked"
"""The request's owner has asked for it: what had taken it is gone."""
REPEATED: Final = "repeated"
"""Its stage's inputs came again, and it had run."""
CHECKPOINT: Final = "checkpoint"
"""A store node kept it, and nobody else had it any more."""
RESEND_REASONS: Final = (PEER_LOST, ASKED, REPEATED, CHECKPOINT)


@define(eq=False)
class StageCounts:
    """One stage on one device (or several together), over all its actors."""

    loads: int = 0
    """How often it was loaded, also anew."""
    wasted_seconds: defaultdict[str, float] = field(factory=lambda: defaultdict(float))
    """Of runs whose outcome nobody could use, by the error that made it so."""
    dropped: "Counter[str]" = field(factory=Counter)
    """Stage tasks that were here and never ran, by the error."""
    ended_runs: int = 0
    """Finished runs of actors that have ended."""
    ended_seconds: float = 0.0
    fruitless_seconds: float = 0.0
    """Of runs that put nothing out."""

    def ran_in_vain(self, error: str, seconds: float) -> None:
        """A run has ended without an output."""
        self.fruitless_seconds += seconds
        self.wasted_seconds[error] += seconds

    def put_out_in_vain(self, error: str, seconds: float) -> None:
        """A run has an output, and its request had ended meanwhile."""
        self.wasted_seconds[error] += seconds

    def actor_ended(self, work: StageWork) -> None:
        """An actor is gone, and what it counted itself with it."""
        self.ended_runs += work.runs
        self.ended_seconds += work.seconds


@define(eq=False)
class Counts:
    """All of one node."""

    resent: "Counter[tuple[str, str]]" = field(factory=Counter)
    """Outputs that were sent again, by the stage they go to and the reason."""
    stages: dict[tuple[str, str], StageCounts] = field(factory=dict)
    """By stage and device."""

    def of_stage(self, stage: str, device: str) -> StageCounts:
        """Those of one stage on one device."""
        return self.stages.setdefault((stage, device), StageCounts())
