"""Which owners of requests are gone.

A request is owned by the proxy that accepted it. When that proxy dies its record is lost, so whatever
its stages still compute has nobody to go to, and stands in the way of others. A proxy that is started
anew at the same address is another owner; its requests are told from those of before by the moment they
were received, which is written by the same clock as its incarnation.
"""

from collections.abc import Iterable
from typing import Final

from onepiece.core.routing import NodeRoute
from onepiece.messages import CONTROL_REGION, StageInput

_LOST_MAX: Final = 1024
_INCARNATIONS_PER_SECOND: Final = 1000
"""An incarnation is the moment it began, in milliseconds."""


class LostOwners:
    """The addresses of owners that died, and since when requests from there are sound again."""

    def __init__(self) -> None:
        self._lost_before: dict[str, float] = {}

    def update(self, gone: Iterable[NodeRoute], living: Iterable[NodeRoute], now: float) -> None:
        """Learn of nodes (incarnations) that are gone, and of those that are there."""
        for node in gone:
            self._lost_before[_owner(node)] = now
        for node in living:
            owner, began_at = _owner(node), node.incarnation / _INCARNATIONS_PER_SECOND
            if owner in self._lost_before:
                self._lost_before[owner] = min(self._lost_before[owner], began_at)
        while len(self._lost_before) > _LOST_MAX:
            del self._lost_before[next(iter(self._lost_before))]

    def is_lost(self, header: StageInput) -> bool:
        """The request was accepted by a proxy that is gone."""
        return header.received_at < self._lost_before.get(header.owner, 0.0)


def _owner(node: NodeRoute) -> str:
    return f"{node.address}/{CONTROL_REGION}"
