"""A session around another one, from which those that observe or disturb it are derived."""

from collections.abc import Sequence

from attrs import evolve

from transports.device_memory import Device
from transports.memory import Capabilities, RemoteMemory
from transports.operations import Bytes, Chain, Claim, Claimed, CompareAndSwap, Expired, Guarded, Put


class ForwardingMemory(RemoteMemory):
    """Passes every operation on; a swap and its chain travel apart, so that things can come between."""

    def __init__(self, inner: RemoteMemory) -> None:
        self._inner = inner

    @property
    def capabilities(self) -> Capabilities:
        """As inside, but without guarded operations."""
        return evolve(self._inner.capabilities, guarded_bytes_max=0)

    @property
    def session(self) -> int:
        """The number the owner gave this session."""
        return self._inner.session

    @property
    def welcome(self) -> bytes:
        """What the owner answered to our hello."""
        return self._inner.welcome

    async def read(self, offset: int, length: int) -> Bytes:
        """Fetch bytes of the region."""
        return await self._inner.read(offset, length)

    async def compare_and_swap(self, swap: CompareAndSwap) -> int | Expired:
        """Swap a word if it is as expected."""
        return await self._inner.compare_and_swap(swap)

    async def claim(self, claim: Claim) -> Claimed:
        """Have the owner reserve."""
        return await self._inner.claim(claim)

    async def fetch_and_add(self, offset: int, addend: int) -> int:
        """Add to a word."""
        return await self._inner.fetch_and_add(offset, addend)

    async def post(self, chain: Chain) -> None:
        """Post writes."""
        await self._inner.post(chain)

    async def put(self, put: Put) -> None:
        """Post bytes into device memory."""
        await self._inner.put(put)

    def reach(self, device: Device) -> None:
        """Make ready to put what lies on a device."""
        self._inner.reach(device)

    async def guarded(self, guarded: Guarded) -> int | Expired:
        """A swap and the chain behind it, apart."""
        found = await self.compare_and_swap(guarded.swap)
        if found == guarded.swap.expected:
            await self.post(guarded.chain)
        return found

    async def prepare_export(self, length: int) -> None:
        """Make ready for an export."""
        await self._inner.prepare_export(length)

    def export(self, buffers: Sequence[Bytes]) -> bytes:
        """Let the owner pull bytes."""
        return self._inner.export(buffers)

    def withdraw(self, key: bytes) -> None:
        """End an export."""
        self._inner.withdraw(key)

    async def wait_notified(self, timeout_seconds: float) -> bool:
        """Wait for a nudge."""
        return await self._inner.wait_notified(timeout_seconds)

    async def flush(self) -> None:
        """Return when all that was posted before has landed."""
        await self._inner.flush()

    async def close(self) -> None:
        """End the session."""
        await self._inner.close()
