"""Names that are unique without asking anybody: of requests (UIDs) and of nodes.

A UID has 26 characters of Crockford's base 32::

    01JDWX4T9Z 7Q2M3K8V5N6P0R1S
    |          |
    |          80 random bits
    48 bits of milliseconds since the epoch

It sorts by the time it was made, holds no character that a URL or a file name minds, and never
needs a coordinator: two made within one millisecond collide with a chance of 2**-80. Time and
randomness are arguments, so that simulations repeat.
"""

import random
import re
from typing import Final

_ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_RANDOM_BITS: Final = 80
UID_CHARACTERS: Final = 26
_UID: Final = re.compile(f"[0-7][{_ALPHABET}]{{{UID_CHARACTERS - 1}}}")
_NOT_IN_NAMES: Final = re.compile(r"[^a-z0-9-]+")
_HOST_CHARACTERS_MAX: Final = 48
NODE_NAME_CHARACTERS_MAX: Final = 128
_NODE_NAME: Final = re.compile(f"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NODE_NAME_CHARACTERS_MAX - 1}}}")


def _base32(number: int, characters: int) -> str:
    digits = [_ALPHABET[(number >> 5 * place) & 31] for place in reversed(range(characters))]
    return "".join(digits)


def new_uid(now: float, rng: random.Random) -> str:
    """Make a request's UID.

    Args:
        now: Wall-clock seconds since the epoch.
        rng: The source of the random bits; ``random.SystemRandom()`` outside simulations.

    Returns:
        26 characters that sort by ``now``.
    """
    milliseconds = int(now * 1000)
    assert 0 <= milliseconds < 1 << 48, f"{now!r} is no wall-clock time"
    return _base32(milliseconds << _RANDOM_BITS | rng.getrandbits(_RANDOM_BITS), UID_CHARACTERS)


def is_uid(text: str) -> bool:
    """Whether ``text`` has a UID's form; check what comes from a URL before it is used as a key."""
    return _UID.fullmatch(text) is not None


def uid_time(uid: str) -> float:
    """The wall-clock seconds at which the UID was made, to the millisecond."""
    assert is_uid(uid), f"{uid!r} is no UID"
    number = 0
    for character in uid:
        number = number << 5 | _ALPHABET.index(character)
    return (number >> _RANDOM_BITS) / 1000


def new_node_name(host: str, rng: random.Random) -> str:
    """Name a node after its host: readable in logs, and never taken by an earlier life of the node.

    Args:
        host: The host's name; what a node's name cannot hold becomes ``-``.
        rng: The source of the suffix.

    Returns:
        For example ``gpu-07-3kqz9``.
    """
    readable = _NOT_IN_NAMES.sub("-", host.lower()).strip("-")[:_HOST_CHARACTERS_MAX].rstrip("-")
    return f"{readable or 'node'}-{_base32(rng.getrandbits(25), 5).lower()}"


def is_node_name(text: str) -> bool:
    """Whether a node may have this name: a URL or a file name minds none of its characters."""
    return _NODE_NAME.fullmatch(text) is not None
