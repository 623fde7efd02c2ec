"""Copies of results on several store nodes.

Which nodes hold a result's copies follows from its UID alone, by rendezvous hashing, so that whoever
knows the store nodes knows where to write and where to ask; a node that comes or goes moves only the
copies that it takes or leaves. The UID's first choice is the node that ``rendezvous`` picks.
"""

from collections.abc import Iterable

from onepiece.core.routing import ranked


def copy_holders(uid: str, stores: Iterable[str], copies: int) -> tuple[str, ...]:
    """The store nodes that hold copies of what belongs to ``uid``, the first choice first."""
    return tuple(ranked(uid, stores)[:copies])
