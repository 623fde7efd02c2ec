"""Whom a node takes for the leading manager, where several may lead.

::

    started --> asks all candidates at each heartbeat --told--> beats towards the leader
                                                                  |  ^
          every ask_seconds: asks the candidates but the leader --+  +-- told of another: waits, then beats

What it promises:

* The last word counts. A candidate that is wrong (its own view is half a second old) names a manager that
  does not lead, which itself says who does: nothing stays wrong.
* A node that nobody told of a new leader (the message was lost, the node was cut off) asks at least every
  ``ASK_SECONDS``, and each time all candidates of the routes. Where they do not answer, or there are none, it
  asks those that it was told to join, too; while they do, it leaves alone what may be long gone.
* Nodes that are told of a new leader at the same moment register at different ones: each waits for its own
  random part of ``spread_seconds``, which grows with the set, so that a new leader hears at most
  ``REGISTRATIONS_PER_SECOND`` new nodes a second on average up to 1,000 nodes.
* All of that takes less than the time for which a new leader waits before it publishes routes (see
  ``manager``): no node is missing in its first table that only had not heard of it yet.
* A set with one manager (nobody ever said who leads, and one address to join) asks nobody.

It knows no clock and draws nothing: the caller gives the time, and numbers from [0, 1).
"""

from collections.abc import Iterable
from typing import Final

from attrs import define, field

ASK_SECONDS: Final = 2.0
"""The longest time between two rounds of questions; the shortest is half of it."""
SPREAD_SECONDS_MAX: Final = 2.0
REGISTRATIONS_PER_SECOND: Final = 500
CANDIDATES_MAX: Final = 8
"""As many are asked at once; there is little use in more."""


def spread_seconds(nodes: int) -> float:
    """For how long a set of so many nodes stretches its registrations with a new leader."""
    return min(SPREAD_SECONDS_MAX, nodes / REGISTRATIONS_PER_SECOND)


@define
class LeaderSearch:
    """One node's view of who leads.

    Args:
        joins: Control addresses that the node was told to join.
    """

    joins: tuple[str, ...]
    leader: str = field(init=False)
    """Where heartbeats go."""
    quiet_until: float = field(default=float("-inf"), init=False)
    """No heartbeat is sent before."""
    _is_told: bool = field(default=False, init=False)
    _told_at: float = field(default=float("-inf"), init=False)
    _asks_at: float = field(default=float("-inf"), init=False)

    def __attrs_post_init__(self) -> None:
        assert self.joins
        self.leader = self.joins[0]

    def told(self, address: str, nodes: int, now: float, draw: float) -> bool:
        """A candidate says who leads; returns whether that is news.

        Args:
            address: The leader's control address.
            nodes: How many nodes the set has, as far as is known.
            now: The time.
            draw: From [0, 1).
        """
        self._is_told, self._told_at = True, now
        if address == self.leader:
            return False
        self.leader = address
        self.quiet_until = now + draw * spread_seconds(nodes)
        return True

    def to_ask(self, managers: Iterable[str], now: float, draw: float) -> tuple[str, ...]:
        """The candidates to ask now; ``managers`` are the control addresses of those that the routes name."""
        if now < self._asks_at or not (self._is_told or len(self.joins) > 1):
            return ()
        if self._is_told:
            self._asks_at = now + ASK_SECONDS * (0.5 + 0.5 * draw)
        known = [each for each in dict.fromkeys(managers) if each != self.leader]
        if not known or now > self._told_at + 2 * ASK_SECONDS:
            known += [each for each in self.joins if each not in known]
        return tuple(known)[:CANDIDATES_MAX]
