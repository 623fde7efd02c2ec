"""Which fault comes next. Pure: chance is an argument, and what a fault does is done elsewhere.

A node is *hurt* from a fault on until it takes part again. Faults are drawn so that the set can heal:
at most ``HURT_MAX`` nodes are hurt at a time, of those with a store one (two copies are kept of what
must not be lost), of the proxies one. A connection may break at any time: that hurts nobody for long.
"""

import enum
import random
from collections.abc import Sequence
from typing import Final

from attrs import frozen

HURT_MAX: Final = 2
STORES_HURT_MAX: Final = 1
PROXIES_HURT_MAX: Final = 1


class FaultKind(enum.Enum):
    """What is done to a node."""

    KILL = "kill -9"
    PAUSE = "stop beyond the lease"
    CUT = "close a connection"


@frozen
class Target:
    """A node as the drawing sees it."""

    name: str
    roles: frozenset[str]
    is_hurt: bool


@frozen
class Fault:
    """What to do to whom; ``seconds``: how long it is stopped, or until it is started again."""

    kind: FaultKind
    name: str
    seconds: float = 0.0


def draw_fault(
    rng: random.Random, nodes: Sequence[Target], kinds: Sequence[FaultKind], lease_seconds: float
) -> Fault | None:
    """The next fault; None if nobody may be hurt now.

    Args:
        rng: Chance.
        nodes: All nodes of the set.
        kinds: Which faults may be drawn.
        lease_seconds: Silence after which a node is declared dead.
    """
    harmful = [kind for kind in kinds if kind is not FaultKind.CUT]
    victims = [node.name for node in nodes if _may_be_hurt(node, nodes)]
    choices = [FaultKind.CUT] if FaultKind.CUT in kinds else []
    choices += harmful if victims else []
    if not choices:
        return None
    kind = rng.choice(choices)
    if kind is FaultKind.CUT:
        standing = [node.name for node in nodes if not node.is_hurt]
        return Fault(kind, rng.choice(standing)) if standing else None
    name = rng.choice(victims)
    if kind is FaultKind.PAUSE:
        return Fault(kind, name, lease_seconds * rng.uniform(1.2, 2.0))
    # Often back before its lease is over: then the new life is what tells that the old one is dead.
    return Fault(kind, name, lease_seconds * rng.uniform(0.0, 1.5))


def _may_be_hurt(node: Target, nodes: Sequence[Target]) -> bool:
    if node.is_hurt:
        return False
    hurt = [other for other in nodes if other.is_hurt]
    if len(hurt) >= HURT_MAX:
        return False
    for role, most in (("store", STORES_HURT_MAX), ("proxy", PROXIES_HURT_MAX)):
        if role in node.roles and sum(role in other.roles for other in hurt) >= most:
            return False
    return True
