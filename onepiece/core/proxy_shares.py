"""Shares: what part of a set's capacity each of its proxies may fill, from what each is asked for.

Max-min fairness, by filling up: a proxy that wants less than an equal share gets what it wants; the others
divide the rest. What nobody wants is given to all in equal parts, so that whoever is asked for more has
room before the others have heard of it. What this promises:

* The shares sum to 1, whatever is wanted; proxies that want the same get the same.
* A proxy gets what it wants, or at least an equal share.
* A proxy that is gone has none: the others divide all of it. Nobody leases anything, and nobody has to be
  asked: each proxy derives the shares from the route table and from what the others last said.

Until they have heard of each other's new wishes the shares of two proxies may sum to more than 1, for one
exchange of loads, by at most what one of them may newly want. The forecast of each sees the queue that
comes of it through its own requests.
"""

from collections.abc import Mapping

_ROUNDING = 1e-12


def shares(wanted: Mapping[str, float]) -> dict[str, float]:
    """The share of each proxy.

    Args:
        wanted: By proxy: what it is asked for, as a part of the set's capacity; may exceed 1, and may be
            infinite for one that has not been heard yet.
    """
    if not wanted:
        return {}
    found = {}
    rest, open_ = 1.0, len(wanted)
    for proxy in sorted(wanted, key=lambda proxy: (wanted[proxy], proxy)):
        assert wanted[proxy] >= 0
        found[proxy] = min(wanted[proxy], rest / open_)
        rest -= found[proxy]
        open_ -= 1
    spare = max(0.0, rest) / len(wanted)
    shared = {proxy: share + spare for proxy, share in found.items()}
    assert abs(sum(shared.values()) - 1) < 1e-6 + _ROUNDING * len(wanted)
    return shared
