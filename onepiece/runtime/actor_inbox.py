"""An actor's inbox, in the memory that its stage asks for."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from onepiece.graph import InboxMemory, StageSpec
from onepiece.limits import INBOX_HEAD_BYTES
from onepiece.runtime.environment import Environment
from transports import DeviceUnreachable, Geometry, Receiver

_SLOTS: Final = 1024


class InboxRefused(Exception):  # noqa: N818 - named by what has happened
    """A stage cannot have its inbox where it wants it; the text says why, and what to do."""


def device_inbox_bytes(env: Environment, spec: StageSpec) -> int:
    """What an inbox for this stage takes of its device's memory."""
    return env.inbox_bytes if spec.inbox is InboxMemory.DEVICE else 0


@asynccontextmanager
async def open_actor_inbox(
    env: Environment, region: str, spec: StageSpec, device: str
) -> AsyncIterator[Receiver]:
    """Serve an actor's inbox; leaving the block closes it.

    Args:
        env: Its node.
        region: The inbox's name.
        spec: Its stage.
        device: The name of the device that it runs on.

    Raises:
        InboxRefused: The stage wants it in its device's memory, and it cannot be there. It never is in
            another memory than was asked for.
    """
    is_apart = spec.inbox is InboxMemory.DEVICE
    way_out = f"or leave inbox='device' out of {spec.key}"
    if is_apart and not device.startswith("cuda:"):
        raise InboxRefused(
            f"DeviceUnreachable: {spec.key} wants its inbox in the memory of its GPU, and {device} is none:"
            f" run it where there is one (worker nodes: --devices cuda:0), {way_out}"
        )
    head_bytes = INBOX_HEAD_BYTES if is_apart else 0
    geometry = Geometry(_SLOTS, env.inbox_bytes, _SLOTS, head_bytes)
    opening = env.inboxes.open(region, geometry, memory=device if is_apart else "host")
    async with AsyncExitStack() as stack:
        try:
            inbox = await stack.enter_async_context(opening)
        except DeviceUnreachable as error:
            raise InboxRefused(f"DeviceUnreachable: {error}; {way_out}") from error
        yield inbox
