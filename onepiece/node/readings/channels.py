"""A node's inboxes and links: what lies in them, what carries their bytes, what was given up."""

from collections.abc import Iterator, Mapping

from onepiece import metrics_catalogue as catalogue
from onepiece.metrics import Sample
from onepiece.runtime.environment import Environment, kind_of_inbox
from onepiece.runtime.link_view import LinkView
from onepiece.runtime.outbox import OVERFLOW, PEER_LOST
from transports import FENCE_REASONS, Address


def inboxes(env: Environment, stages: Mapping[str, str]) -> Iterator[Sample]:
    """The rings that others send to; ``stages`` has the stage of each actor's."""
    for name, receiver in env.inboxes.receivers():
        labels = kind_of_inbox(name), stages.get(name, "")
        size_bytes = receiver.geometry.payload_bytes
        yield catalogue.INBOX_BYTES.of(size_bytes - receiver.free_bytes, *labels)
        yield catalogue.INBOX_LIMIT_BYTES.of(size_bytes, *labels)
        yield catalogue.INBOX_MESSAGES.of(receiver.depth, *labels)
        yield catalogue.INBOX_PULLED_BYTES.of(receiver.pulled_bytes, *labels)
        yield catalogue.INBOX_PULLED_LIMIT_BYTES.of(receiver.pulled_bytes_max, *labels)
    for inbox, fenced in env.inboxes.fenced.items():
        for reason in FENCE_REASONS:
            yield catalogue.SESSIONS_FENCED.of(fenced[reason], inbox, reason)


def links(env: Environment) -> Iterator[Sample]:
    """The ways out, to whomever they lead."""
    for link in env.outbox.links():
        if link.wire is not None:
            yield catalogue.LINKS.of(1, *wire_of(link))
        yield catalogue.LINKS_OPENING.of(link.wire is None)
        yield catalogue.LINK_MESSAGES.of(link.not_taken)
        yield catalogue.LINK_LENT_BYTES.of(link.lent_bytes)
        yield catalogue.CONTROL_QUEUED.of(link.queued)
    for reason in (OVERFLOW, PEER_LOST):
        yield catalogue.CONTROL_LOST.of(env.outbox.lost[reason], reason)


def wire_of(link: LinkView) -> tuple[str, str]:
    """The scheme of a link's address, and the kind of its wire; details, of which there are many, are cut."""
    return Address.parse(link.address).scheme, (link.wire or "").partition(" ")[0]
