"""What this node has sent to actors, and does not know to be done with yet: by that it picks the next one.

A message counts for its actor from its sending until the actor's stage has handed on what it made of it: an
output until its retainer lets go of it, a request's inputs until their stage is reported finished. Both are
told a moment late (``REPORT_LINGER_SECONDS``, and for an output another look at its target's ring), and for
all actors alike. A join counts at its request's owner like inputs, from when that one chose where it meets.
What other nodes have sent there is not known here; nor is a message that nobody retains, which counts only
while it is sent.
"""

from collections import Counter
from collections.abc import Mapping

from onepiece.core.retention import OutputKey
from onepiece.graph import INPUTS
from onepiece.limits import ACTORS_PICKED_MAX


class UnderWay:
    """See the module's text; what it holds is bounded by the requests that have not ended."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._actors: dict[str, dict[OutputKey, int]] = {}
        """By UID, so that a request that ends leaves nothing."""
        self._picked: dict[int, int] = {}
        self._picks = 0

    @property
    def counts(self) -> Mapping[int, int]:
        """How many messages each actor has; who is absent has none."""
        return self._counts

    @property
    def picked(self) -> Mapping[int, int]:
        """When each actor was picked last, counted in picks; in this order."""
        return self._picked

    def pick(self, actor_id: int) -> None:
        """An actor is chosen for a message; of very many the one picked longest ago is forgotten."""
        self._picks += 1
        self._picked.pop(actor_id, None)
        self._picked[actor_id] = self._picks
        if len(self._picked) > ACTORS_PICKED_MAX:
            del self._picked[next(iter(self._picked))]

    def __len__(self) -> int:
        return sum(map(len, self._actors.values()))

    def sent(self, key: OutputKey, actor_id: int) -> None:
        """A message goes to an actor; one that went elsewhere before does not count there any more."""
        self.done(key)
        self.pick(actor_id)
        self._actors.setdefault(key.uid, {})[key] = actor_id
        self._counts[actor_id] += 1

    def met(self, uid: str, joins: Mapping[str, int]) -> None:
        """This node chose where inputs meet, by graph node: whoever sends them, it counts that here."""
        for node_id, actor_id in joins.items():
            self.sent(OutputKey(uid, INPUTS, node_id), actor_id)

    def done(self, key: OutputKey) -> None:
        """Its actor is done with a message, or has not got it; no error if nothing is known of it."""
        of_request = self._actors.get(key.uid, {})
        actor_id = of_request.pop(key, None)
        if actor_id is None:
            return
        if not of_request:
            del self._actors[key.uid]
        self._drop(actor_id)

    def ended(self, uid: str) -> None:
        """A request has ended, and with it all that was sent for it."""
        for actor_id in self._actors.pop(uid, {}).values():
            self._drop(actor_id)

    def _drop(self, actor_id: int) -> None:
        self._counts[actor_id] -= 1
        if not self._counts[actor_id]:
            del self._counts[actor_id]
