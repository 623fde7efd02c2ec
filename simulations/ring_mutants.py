"""Twenty-three ways to build the ring wrongly, each of which the explorer must find.

A mutant is the product's producer or consumer with one thing taken away or turned round, in the
smallest setting in which that shows. The product has no switch for any of this.

The hashes are off in nearly all of them: what is shown is that the *order* of steps and the *fence* carry the
promises. The hashes stand behind them, for damage and for adapters that show bytes late. They are on where
the mutant lies behind damage that only they find; and their absence is a mutant where a region is retired.
"""

from typing import Final

from attrs import frozen

from simulations.ring_consumer import BlindConsumer, ModelConsumer
from simulations.ring_exports import EarlyExports
from simulations.ring_producer import BlindProducer, ModelProducer
from simulations.ring_state import Setting
from transports.operations import Bytes, Carry, Chain, Claimed, Program, Put, Write
from transports.ring import Claims, Delivery
from transports.ring.consumer import Passed
from transports.ring.layout import GRANULE_BYTES, Slot
from transports.ring.offers import Offer
from transports.ring.producer import Message
from transports.ring.recovery import Boundary
from transports.ring.sessions import Identity


class NoFence(BlindConsumer):
    """Suspects are written off, but what they have posted may still land."""

    def _fence(self, suspected: tuple[int, ...]) -> Program[None]:
        for session in suspected:
            self._table.close(session)
        yield from ()


class FencesOnlyTheLast(BlindConsumer):
    """Where several slots are open, only the session that testimony names is fenced."""

    def _suspects(self, boundary: Boundary) -> tuple[int, ...]:
        return tuple(session for session in self._table.open_numbers() if session == boundary.session)


class NoSpaceCheck(BlindProducer):
    """Reserves whether there is room or not."""

    def _room(self, tail: int, length: int) -> int | None:
        return self._geometry.reserve(tail, tail, length, self._session)


class StaleHead(BlindProducer):
    """Goes on using a snapshot, however old it is."""

    def _usable(self, now: float) -> float:
        return float("inf")


class NoRepeatCheck(BlindConsumer):
    """Hands over whatever is committed."""

    def _is_expected(self, slot: Slot, identity: Identity) -> bool:
        return True


class CommitBeforePayload(BlindProducer):
    """Slot and commit word go first, the payload behind them."""

    def _post(self, message: Message, tail: int) -> Program[None]:
        message.payload_hash = 0
        yield Chain(self._writes_of_slot(message, tail), notify=False)
        yield Chain(self._writes_of_payload(message, tail))

    def _writes(self, message: Message, tail: int) -> tuple[Write, ...]:
        return self._writes_of_slot(message, tail) + self._writes_of_payload(message, tail)


class SealBeforePayload(BlindProducer):
    """Where the payload ring lies apart, the seal is put first and the payload behind it."""

    def _puts(self, message: Message, tail: int) -> tuple[Put, ...]:
        return super()._puts(message, tail)[::-1]


class LooksAtNoSeal(BlindConsumer):
    """Takes the commit word for a sign that the payload has landed in the other memory too."""

    def _is_sealed(self, slot: Slot, start: int) -> Program[bool]:
        yield from ()
        return True


class SealReadAfterTheCopy(BlindConsumer):
    """Where a region is retired, the payload is taken over before it is looked at whether it is whole."""

    def _carry(self, slot: Slot, start: int) -> Program[None]:
        payload = self.geometry.payload_offset(start)
        seal = self.geometry.seal_offset(start, slot.length)
        yield Carry(payload, seal - payload)
        if (yield from self._has_seal(slot, start)):
            yield Carry(seal, GRANULE_BYTES)


class CommitNotCleared(BlindConsumer):
    """Leaves the commit word in a slot that is given back."""

    def _clear(self, sequence: int) -> Program[None]:
        yield from ()


class CommitWithoutSequence(BlindProducer):
    """The commit word says that there is a message, not which one.

    The predecessor says the same once more, under the slot's hash; so it must not be asked either.
    """

    def _commit_word(self, sequence: int) -> int:
        return self._generation_bits | 1


class ReadsCommitWithoutSequence(BlindConsumer):
    """The other half of ``CommitWithoutSequence``."""

    def _commit_word(self, sequence: int) -> int:
        return self._generation_bits | 1

    def _follows(self, predecessor: int, sequence: int) -> bool:
        return True

    def _is_next(self, slot: Slot, cursor: int) -> bool:
        return slot.session in self._table.sessions


class AcknowledgesFirst(BlindConsumer):
    """Counts a message as delivered before it is handed over."""

    def _hand_over(self, delivery: Delivery, identity: Identity, passed: Passed) -> Program[None]:
        if identity.session is not None:
            yield self._acknowledgement(identity.session, delivery.number + 1)
        self._enter(delivery, identity, passed)


class PublishesHeadFirst(BlindConsumer):
    """Gives the room back when a message is handed over, not when it is released."""

    def _hand_over(self, delivery: Delivery, identity: Identity, passed: Passed) -> Program[None]:
        yield from super()._hand_over(delivery, identity, passed)
        yield from self._give_back(delivery.sequence, passed)

    def release(self, delivery: Delivery) -> Program[None]:
        """The layer above has copied the payload; the room is long given back."""
        del self._held[delivery.sequence]
        yield from ()


class AcknowledgesBeforeThePull(BlindConsumer):
    """Counts a message as delivered when its offer is there, and fetches it then."""

    def _pull(self, slot: Slot, offer: Offer) -> Program[Bytes | None]:
        yield self._acknowledgement(slot.session, slot.number + 1)
        content = yield from super()._pull(slot, offer)
        return content


class DropsWhatCannotBePulled(ModelConsumer):
    """Goes on behind an offer that cannot be had, and leaves its producer in the belief that it was."""

    def _refuse(self, slot: Slot) -> Program[None]:
        yield from ()


class Gullible(BlindProducer):
    """Takes the owner's word for it that what it has claimed is its own."""

    def _taken(self, claimed: Claimed, length: int) -> int:
        reserved = self._geometry.reserve(claimed.tail, claimed.tail, length, self._session)
        assert reserved is not None, "an empty ring holds any message"
        return reserved


class ClaimsWithoutRoom(Claims):
    """Gives whoever claims what is next, whether it is free or not."""

    def _reserve(self, tail: int, head: int, length: int, session: int) -> int | None:
        return super()._reserve(tail, tail, length, session)


class ClaimsWithTheFirstHead(Claims):
    """Computes with the head as it was in the beginning."""

    def _reserve(self, tail: int, head: int, length: int, session: int) -> int | None:
        return super()._reserve(tail, 0, length, session)


class ClaimsForAnother(Claims):
    """Lets a claim name the session for which it is."""

    def _reserve(self, tail: int, head: int, length: int, session: int) -> int | None:
        return super()._reserve(tail, head, length, 3 - session)


class WritesWhereItLooked(BlindProducer):
    """Writes where its own snapshot says, though the claim found the tail elsewhere."""

    def _claim(self, length: int, now: float, *, wait: bool) -> Program[tuple[int, int]]:
        before = self._tail
        _, reserved = yield from super()._claim(length, now, wait=wait)
        return before, reserved


@frozen
class Mutant:
    """One wrong ring, and where its fault shows."""

    name: str
    setting: Setting


_TWO: Final = ((1,), (1,))
_WRAPPING: Final = (4, 8)
"""Counters that wrap after two laps of two slots, and of four granules."""

MUTANTS: Final = (
    Mutant("no fence", Setting(_TWO, suspicions=1, consumer=NoFence)),
    Mutant(
        "fence only the last session when several slots are open",
        Setting(_TWO, suspicions=1, consumer=FencesOnlyTheLast),
    ),
    Mutant("no space check", Setting(((1, 1, 1),), producer=NoSpaceCheck)),
    Mutant(
        "the check with a stale head",
        Setting(((1,), (1, 1, 1, 1, 1)), granules=4, moduli=_WRAPPING, producer=StaleHead),
    ),
    Mutant("no repeat check", Setting(_TWO, suspicions=1, consumer=NoRepeatCheck)),
    Mutant("commit written before the payload", Setting(_TWO, producer=CommitBeforePayload)),
    Mutant("payload apart: no look at the seal", Setting(((1,),), apart=True, consumer=LooksAtNoSeal)),
    Mutant("payload apart: the seal before it", Setting(((1,),), apart=True, producer=SealBeforePayload)),
    Mutant(
        "payload apart: the seal read after the copy",
        Setting(((1, 1),), granules=4, suspicions=1, retires=True, apart=True, consumer=SealReadAfterTheCopy),
    ),
    Mutant(
        "commit word not cleared",
        Setting(((1,), (1, 1, 1)), granules=4, crashes=1, moduli=_WRAPPING, consumer=CommitNotCleared),
    ),
    Mutant(
        "the sequence missing from the commit word",
        Setting(((1, 1),), producer=CommitWithoutSequence, consumer=ReadsCommitWithoutSequence),
    ),
    Mutant("acknowledgement before the hand-over", Setting(((1,),), consumer=AcknowledgesFirst)),
    Mutant(
        "head published before the payload was copied",
        Setting(((1, 1, 1),), granules=2, consumer=PublishesHeadFirst),
    ),
    Mutant(
        "what is lent is taken back before it is delivered",
        Setting(((0,),), exports=EarlyExports, checks_generation=False),
    ),
    Mutant("a pull without a check of the generation", Setting(((0,),), cuts=1, checks_generation=False)),
    Mutant("acknowledgement before the pull", Setting(((0,),), consumer=AcknowledgesBeforeThePull)),
    Mutant(
        "what cannot be pulled is dropped, without a fence",
        Setting(((0,),), damages=1, hashes=True, producer=ModelProducer, consumer=DropsWhatCannotBePulled),
    ),
    Mutant(
        "writes of a retired region reach the new one",
        Setting(_TWO, suspicions=1, retires=True, retired_writes_land=True),
    ),
    Mutant("a region is retired without hashes", Setting(_TWO, suspicions=1, retires=True)),
    Mutant(
        "a claim without the space check",
        Setting(((1, 1), (1, 1)), claims=True, claimant=ClaimsWithoutRoom, producer=Gullible),
    ),
    Mutant(
        "a claim with the head of the beginning",
        Setting(
            ((1, 1, 1), (1, 1, 1)),
            granules=4,
            moduli=_WRAPPING,
            claims=True,
            claimant=ClaimsWithTheFirstHead,
            producer=Gullible,
        ),
    ),
    Mutant(
        "a claim that names its session",
        Setting(_TWO, suspicions=1, claims=True, claimant=ClaimsForAnother, producer=Gullible),
    ),
    Mutant(
        "a claim's answer is not looked at",
        Setting(((1,), (1, 1)), slots=3, claims=True, producer=WritesWhereItLooked),
    ),
)

assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
