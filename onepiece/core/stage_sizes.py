"""Stage sizes: what instances of a stage take of each of their devices, as declared, and as it was measured.

A value. What it promises:

* A declaration is the least that is counted: it may know of inputs that have not come yet. What was measured
  raises it: the most that any instance took, and a tenth more.
* Never is more wanted than any device has that a stage could be on: it is known to run on one.
* A measurement is taken up, and so stored and told, if it exceeds the last one by a fiftieth; a stage whose
  peak creeps up makes few writes. A stage that changes, or whose workflow does, begins anew.
* It is bounded by the stages there are.
"""

from collections.abc import Iterable, Mapping
from typing import Final, Self

from attrs import evolve, field, frozen

from onepiece.core.inventory import DeviceKind, RegisteredWorkflow, StageNeed, stage_needs, users_of
from onepiece.core.packing import Room

_STEP: Final = 50
"""Of what was measured, the share by which a new measurement must exceed it."""
_BYTES_MAX: Final = 1 << 50
"""Beyond it a node's word is not believed."""


def with_margin(seen_bytes: int) -> int:
    """A tenth more."""
    return seen_bytes + seen_bytes // 10


@frozen
class StageSizes:
    """See the module's text; ``seen`` is the most that an instance took on a device, in bytes, by stage."""

    seen: Mapping[str, int] = field(factory=dict)

    def told(self, stage: str, peak_bytes: int) -> Self:
        """An instance took so much at most; the same value if that is no news."""
        known = self.seen.get(stage, 0)
        if not known + known // _STEP < peak_bytes < _BYTES_MAX:
            return self
        return evolve(self, seen={**self.seen, stage: peak_bytes})

    def wanted_bytes(self, need: StageNeed) -> int:
        """What is counted for an instance on each of its devices."""
        return max(need.memory_bytes, with_margin(self.seen.get(need.stage, 0)))

    def needs(self, needs: Mapping[str, StageNeed], rooms: Iterable[Room]) -> dict[str, StageNeed]:
        """The needs with what was measured; ``rooms`` are all devices."""
        largest: dict[DeviceKind, int] = {}
        for room in rooms:
            largest[room.kind] = max(largest.get(room.kind, 0), room.memory_bytes)
        return {stage: self._sized(need, largest) for stage, need in needs.items()}

    def _sized(self, need: StageNeed, largest: Mapping[DeviceKind, int]) -> StageNeed:
        if need.stage not in self.seen:
            return need
        most = largest.get(need.kind, max(largest.values(), default=0))
        return evolve(need, memory_bytes=max(need.memory_bytes, min(self.wanted_bytes(need), most)))

    def of(self, before: Iterable[RegisteredWorkflow], after: Iterable[RegisteredWorkflow]) -> Self:
        """What is left when workflows change."""
        before, after = tuple(before), tuple(after)
        old, new = stage_needs(before), stage_needs(after)
        kept = {
            stage: seen
            for stage, seen in self.seen.items()
            if stage in new
            and old.get(stage) == new[stage]
            and not _is_renewed(users_of(stage, before), users_of(stage, after))
        }
        return self if kept.keys() == self.seen.keys() else evolve(self, seen=kept)


def _is_renewed(before: Iterable[RegisteredWorkflow], after: Iterable[RegisteredWorkflow]) -> bool:
    """Whether a workflow that has the stage is of another version now."""
    old = {workflow.name: workflow.digest for workflow in before}
    return any(old.get(workflow.name, workflow.digest) != workflow.digest for workflow in after)
