"""A link of the outbox as it is shown."""

from attrs import frozen


@frozen
class LinkView:
    """A link as it is now."""

    address: str
    wire: str | None
    """What carries its bytes, as the transport names it; None: it is not open yet."""
    not_taken: int
    """Messages that were sent and that the peer was not seen to take."""
    queued: int
    """Control messages and reports that were not sent yet."""
    lent_bytes: int
    """Of messages that the peer has not pulled yet."""
