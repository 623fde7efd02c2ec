"""A ring's consumer whose large payloads are hashed by whoever polls, in a thread of theirs."""

from collections.abc import Sequence

from transports.hashing import HASH_ELSEWHERE_BYTES
from transports.operations import Bytes
from transports.ring import Consumer


class HashElsewhere(Exception):  # noqa: N818  # no error: it ends a poll that has changed nothing
    """The payload at the cursor is large: hash it in a thread, then poll again."""

    def __init__(self, payload: Sequence[Bytes]) -> None:
        super().__init__()
        self.payload = payload


class PatientConsumer(Consumer):
    """Leaves the hash of a large payload to whoever polls."""

    hashes_here = False
    """Compute every hash in place: after a fence, and in the poll for which one was computed elsewhere."""
    computed: int | None = None
    """The hash of the payload at the cursor; good for one look."""

    def _hash_payload(self, payload: Sequence[Bytes]) -> int:
        computed, self.computed = self.computed, None
        if computed is not None:
            return computed
        if not self.hashes_here and sum(map(len, payload)) >= HASH_ELSEWHERE_BYTES:
            raise HashElsewhere(payload)
        return super()._hash_payload(payload)
