"""Claims of keys on one store node: which request a key is about to stand for.

A proxy that accepts a request with a key first claims the key at every store node that is to keep the
record, and only then has the record kept anywhere. So of two proxies that were given one key one is
refused before either of them has left a record::

    free --claim--> claimed by a request --its record is kept--> free: the request log knows the key now
      ^                     |
      +--released, too old, or its owner's life is over

What is promised: while a claim stands nothing else gets the key here. No promise rests on how long it
does: a record whose claim is over is kept all the same, unless the key is another's by then.
"""

from collections.abc import Container

from attrs import define, field, frozen


@frozen
class _Claim:
    uid: str
    owner_life: str
    until: float


@define(eq=False)
class KeyClaims:
    """The claims of one store node.

    Args:
        claims_max: More are refused, until some are over.
        seconds: How long a claim stands.
    """

    claims_max: int
    seconds: float
    _claims: dict[str, _Claim] = field(factory=dict, init=False)
    """By key; what is over first stands first."""

    def __len__(self) -> int:
        return len(self._claims)

    def claim(self, key: str, uid: str, owner_life: str, *, living: Container[str], now: float) -> bool:
        """Give a key to a request, for a while; false if another one has it, or if there are too many.

        Args:
            key: The key.
            uid: The request, which may claim it again.
            owner_life: The life of its proxy's node.
            living: The lives of all nodes that are there.
            now: Seconds on a clock that does not jump.
        """
        if not self.is_free(key, uid, living=living, now=now):
            return False
        self._claims.pop(key, None)
        self._forget_old(now)
        if len(self._claims) >= self.claims_max:
            return False
        self._claims[key] = _Claim(uid, owner_life, now + self.seconds)
        return True

    def is_free(self, key: str, uid: str, *, living: Container[str], now: float) -> bool:
        """Whether no request but this one has claimed the key."""
        known = self._claims.get(key)
        return known is None or known.uid == uid or known.until <= now or known.owner_life not in living

    def release(self, key: str, uid: str) -> None:
        """Let go of a key, if it is this request's."""
        known = self._claims.get(key)
        if known is not None and known.uid == uid:
            del self._claims[key]

    def _forget_old(self, now: float) -> None:
        old = []
        for key, claim in self._claims.items():
            if claim.until > now:
                break
            old.append(key)
        for key in old:
            del self._claims[key]
