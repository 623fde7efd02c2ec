"""How a receiver gets a message that is offered to it: into which memory, within which time, and its hash."""

import asyncio
import logging
from typing import Final

from attrs import frozen

from transports.deliveries import Leniency
from transports.errors import TransportError
from transports.hashing import hash_patiently
from transports.memory import Region
from transports.operations import Pull
from transports.spare_memory import SpareMemory, Taken

_LOG: Final = logging.getLogger(__name__)


@frozen
class Pulled:
    """A message as it came."""

    content: memoryview
    computed: int
    """Its hash."""


@frozen
class Pulls:
    """Those of one receiver.

    Args:
        leniency: How long a pull may take.
        spare: What is pulled into.
    """

    _leniency: Leniency
    _spare: SpareMemory

    async def of(self, region: Region, pull: Pull) -> Pulled | None:
        """What a session exports; ``None``, and a line in the log, if it cannot be had within the lease."""
        limit = self._leniency.lease_seconds + pull.length / self._leniency.slowest_bytes_per_second
        try:
            taken = self._spare.take(pull.length)
            async with asyncio.timeout(limit):
                computed = await _fetch(region, pull, taken)
        except TimeoutError:
            _LOG.warning("%s were not to be had in %f s", _what(region, pull), limit)
            return None
        except (TransportError, OSError) as error:
            _LOG.warning("%s cannot be had: %s", _what(region, pull), error)
            return None
        content = taken.view
        return Pulled(content, await hash_patiently((content,)) if computed is None else computed)


async def _fetch(region: Region, pull: Pull, taken: Taken) -> int | None:
    try:
        return await region.pull(pull.session, pull.key, taken.view)
    except BaseException:
        taken.never_again()  # whatever was to fill it may still do so
        raise


def _what(region: Region, pull: Pull) -> str:
    return f"{pull.length} bytes of session {pull.session} at {region.address}"
