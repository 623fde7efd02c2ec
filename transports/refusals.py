"""Identities that a receiver takes nothing from any more."""

from collections import OrderedDict
from typing import Final

_REMEMBERED_MAX: Final = 4096


class Refusals:
    """Refused names, and with each those that go on behind it with a slash; the oldest is forgotten."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, None] = OrderedDict()

    def add(self, name: str) -> None:
        """Refuse this name from now on."""
        self._names[name] = None
        if len(self._names) > _REMEMBERED_MAX:
            self._names.popitem(last=False)

    def __contains__(self, name: str) -> bool:
        parts = name.split("/")
        return any("/".join(parts[:end]) in self._names for end in range(1, len(parts) + 1))
