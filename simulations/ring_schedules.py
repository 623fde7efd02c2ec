"""``python -m simulations schedules``: large rings under random schedules, one seed each.

What the explorer does not reach (many producers, long messages, real hashes, real deadlines) is run here, one
operation at a time, in an order drawn from a seed: writes land late and in pieces, producers stall
for longer than their lease, die, lose their connections; the consumer holds messages and releases
them in any order. Some messages are larger than the ring and are pulled, now and then damaged. Time is
the number of steps.

Judged at every hand-over and every release: promises 1 to 3. Judged at the end: everybody alive has
got everything through (4), and memory and books agree throughout (5 and the ring's invariants).
"""

import argparse
import time
from collections import deque
from random import Random
from typing import Any, Final

from attrs import define, field, frozen

from transports.errors import RingFull, SessionFenced
from transports.operations import (
    EXPIRED,
    Bytes,
    Chain,
    Claim,
    CompareAndSwap,
    Fence,
    Guarded,
    Load,
    Operation,
    Pause,
    Program,
    Pull,
    Read,
    Store,
)
from transports.ring import Claims, Consumer, Delivery, Geometry, Producer, SessionsExhausted
from transports.ring.consumer import Passed
from transports.ring.invariants import broken
from transports.ring.layout import GRANULE_BITS, HEAD_OFFSET, TAIL_OFFSET, WORD, hash_payload
from transports.ring.offers import Exports, Lent, Offer
from transports.ring.sessions import Identity

HELP: Final = "run large rings under random schedules"

_GENERATION: Final = 5
_STEPS_MAX: Final = 400_000
_LENT_RINGS: Final = 3
"""Payload rings that a pulled message may have, a sender lend and the consumer hold."""
_DAMAGED: Final = 0.1
"""The share of pulls that bring something else, where connections break too."""


class ScheduleFailed(AssertionError):  # noqa: N818  # named by what happened, as in transports.errors
    """A promise was broken; the message says which, in which step of which seed."""


@frozen
class Drawn:
    """What a seed has drawn: the size of everything, and how often which fault comes."""

    seed: int
    slots: int
    granules: int
    producers: int
    messages: int
    lease_steps: int
    guarded: bool
    origin: int
    """The position at which the ring begins: often just before the counters wrap."""
    consuming: float
    """The consumer's share of the steps."""
    stall: float
    cut: float
    crash: float
    pulled: float
    """The share of messages that are pulled."""
    claims: bool
    """The owner executes claims."""


def draw(seed: int) -> Drawn:
    """The options of a seed."""
    rng = Random(seed)  # noqa: S311  # a schedule must be repeatable, not secret
    geometry = Geometry(slots := rng.randint(1, 12), (granules := rng.randint(1, 40)) * 64, 1)
    back = rng.choice((0, rng.randint(1, 30)))
    origin = -back % geometry.sequence_modulus << GRANULE_BITS | -back % geometry.granule_modulus
    return Drawn(
        seed=seed,
        slots=slots,
        granules=granules,
        producers=rng.randint(1, 6),
        messages=rng.randint(5, 30),
        lease_steps=rng.choice((150, 600, 2000)),
        guarded=rng.random() < 0.3,
        origin=origin,
        consuming=rng.choice((0.05, 0.15, 0.35)),
        stall=rng.choice((0.0, 0.002, 0.01)),
        cut=rng.choice((0.0, 0.002, 0.02)),
        crash=rng.choice((0.0, 0.0005)),
        pulled=rng.choice((0.0, 0.3)),
        claims=rng.random() < 0.5,
    )


@define
class Wire:
    """One connection: the writes that were posted on it and have not landed."""

    posted: deque[list[tuple[int, bytes]]] = field(factory=deque)
    """Each a list of pieces, which land in any order."""
    revoked: bool = False


@define
class Sender:
    """One producer process: its messages, its session, and what it is doing."""

    name: str
    messages: list[bytes]
    pulled: list[bool]
    producer: Producer | None = None
    """``None``: without a session."""
    session: int = 0
    wire: Wire = field(factory=Wire)
    program: Program[int] | None = None
    outcome: Any = None
    operation: Operation | None = None
    asleep_until: int = 0
    alive: bool = True
    handed: int = 0
    exports: Exports = field(factory=lambda: Exports(0))
    lent: dict[bytes, bytes] = field(factory=dict)
    """What may be pulled from its session, by key."""
    keys: int = 0


@define
class World:
    """A run in progress."""

    drawn: Drawn
    rng: Random
    memory: bytearray
    consumer: "_WatchedConsumer"
    senders: list[Sender]
    step: int = 0
    wires: dict[int, Wire] = field(factory=dict)
    """Of every session that is not revoked."""
    polling: Program[Delivery | None] | None = None
    poll_operation: Operation | None = None
    held: list[tuple[Delivery, bytes]] = field(factory=list)

    def fail(self, promise: int, what: str) -> ScheduleFailed:
        """The error that says what was broken."""
        return ScheduleFailed(f"promise {promise} in step {self.step}: {what}; {self.drawn!r}")


def run_schedule(seed: int) -> int:
    """Run one seed to its end; returns the number of steps.

    Raises:
        ScheduleFailed: a promise was broken.
    """
    world = _world(draw(seed))
    rng = world.rng
    while world.step < _STEPS_MAX:
        world.step += 1
        if world.step % 64 == 0 and _done(world):
            return world.step
        faults_end = world.step > _STEPS_MAX // 2
        if rng.random() < world.drawn.consuming:
            _consumer_step(world)
        elif rng.random() < 0.5:
            _sender_step(world, rng.choice(world.senders), calm=faults_end)
        else:
            _land_one(world)
        if world.step % 256 == 0 and world.polling is None:
            for what in broken(world.consumer, world.memory):
                raise world.fail(5, what)
    raise world.fail(4, "not everything arrived in time")


def _world(drawn: Drawn) -> World:
    rng = Random(drawn.seed + 1)  # noqa: S311  # as above
    geometry = Geometry(drawn.slots, drawn.granules * 64, drawn.producers + 3)
    memory = bytearray(geometry.region_bytes)
    memory[TAIL_OFFSET : TAIL_OFFSET + 8] = memory[HEAD_OFFSET : HEAD_OFFSET + 8] = WORD.pack(drawn.origin)
    senders = []
    for at in range(drawn.producers):
        pulled = [rng.random() < drawn.pulled for _ in range(drawn.messages)]
        longest = [geometry.message_bytes_max * (_LENT_RINGS if pull else 1) for pull in pulled]
        messages = [rng.randbytes(_length(rng, length)) for length in longest]
        senders.append(Sender(f"producer {at}", messages, pulled))
    consumer = _WatchedConsumer(drawn, geometry)
    return World(drawn, rng, memory, consumer, senders)


def _length(rng: Random, longest: int) -> int:
    return rng.choice((rng.randint(0, longest), rng.randint(0, min(longest, 130))))


class _WatchedConsumer(Consumer):
    """A consumer that begins anywhere, and shows what it hands over."""

    def __init__(self, drawn: Drawn, geometry: Geometry) -> None:
        super().__init__(
            geometry,
            generation=_GENERATION,
            lease_seconds=float(drawn.lease_steps),
            slowest_bytes_per_second=64.0,
            pulled_bytes_max=_LENT_RINGS * geometry.payload_bytes,
        )
        self._head = self._cursor = drawn.origin
        self.handed: list[Delivery] = []

    def _enter(self, delivery: Delivery, identity: Identity, passed: Passed) -> None:
        super()._enter(delivery, identity, passed)
        self.handed.append(delivery)


def _done(world: World) -> bool:
    arrived = all(not sender.alive or sender.handed == len(sender.messages) for sender in world.senders)
    return arrived and not world.held and world.polling is None


# Producers.


def _sender_step(world: World, sender: Sender, *, calm: bool) -> None:
    rng, drawn = world.rng, world.drawn
    if not sender.alive or world.step < sender.asleep_until:
        return
    if not calm:
        if rng.random() < drawn.stall:
            sender.asleep_until = world.step + rng.randint(1, 3 * drawn.lease_steps)
            return
        if rng.random() < drawn.crash and sum(other.alive for other in world.senders) > 1:
            sender.alive = False
            sender.lent.clear()
            return
        connected = sender.producer is not None and not sender.wire.revoked
        if rng.random() < drawn.cut and connected and _consumer_is_reachable(world):
            _revoke(world, sender.session)
            world.consumer.close_session(sender.session)
    if sender.producer is None:
        _reconnect(world, sender)
        return
    try:
        _advance(world, sender, sender.producer)
    except SessionFenced:
        sender.producer = sender.program = sender.operation = None
        sender.lent.clear()


def _consumer_is_reachable(world: World) -> bool:
    """Connections come and go between polls, and while one waits for a fence or a pull."""
    return world.polling is None or isinstance(world.poll_operation, Fence | Pull)


def _reconnect(world: World, sender: Sender) -> None:
    if not _consumer_is_reachable(world) or sender.handed == len(sender.messages):
        return
    try:
        session, first_number = world.consumer.open_session(sender.name)
    except SessionsExhausted:
        return
    if first_number != sender.handed:
        raise world.fail(3, f"{sender.name} is told {first_number}, {sender.handed} were handed over")
    sender.session = session
    world.wires[session] = sender.wire = Wire()
    sender.exports = Exports(_LENT_RINGS * world.consumer.geometry.payload_bytes)
    sender.lent.clear()
    sender.producer = Producer(
        world.consumer.geometry,
        session=session,
        generation=_GENERATION,
        first_number=first_number,
        lease_seconds=float(world.drawn.lease_steps),
        guarded_bytes_max=1000 if world.drawn.guarded else 0,
        claims=world.drawn.claims,
    )
    sender.producer.hash_after_post_bytes = 100


def _advance(world: World, sender: Sender, producer: Producer) -> None:
    if sender.program is None:
        if producer.next_number == len(sender.messages):
            if sender.wire.revoked:
                raise SessionFenced
            return
        message = sender.messages[producer.next_number]
        pull = sender.pulled[producer.next_number]
        if pull:
            if not sender.exports.has_room(len(message)):
                _look(world, sender)
                return
            message = _lend(sender, producer.next_number, message)
        cut = world.rng.randint(0, len(message))
        sender.program = producer.send(
            (message[:cut], memoryview(message)[cut:]),
            kind=1,
            now=float(world.step),
            wait=world.rng.random() < 0.7,
            pull=pull,
        )
        sender.operation = None
    try:
        if sender.operation is None:
            sender.operation = next(sender.program)
        else:
            sender.operation = sender.program.send(_carry_out(world, sender, sender.operation))
    except (StopIteration, RingFull) as end:
        if isinstance(end, RingFull) and sender.pulled[producer.next_number]:
            del sender.lent[sender.exports.take_back(producer.next_number)]
        sender.program = sender.operation = None
        if producer.delivered > sender.handed:
            raise world.fail(3, f"{sender.name} believes {producer.delivered} delivered") from None


def _lend(sender: Sender, number: int, message: bytes) -> bytes:
    """Lend a message; what is sent instead of it."""
    sender.keys += 1
    key = sender.keys.to_bytes(8, "little")
    sender.exports.lend(Lent(number, len(message), key))
    sender.lent[key] = message
    return Offer(len(message), hash_payload((message,)), key).to_bytes()


def _look(world: World, sender: Sender) -> None:
    """Take back what was delivered."""
    if sender.wire.revoked:
        raise SessionFenced
    offset = world.consumer.geometry.delivered_offset(sender.session)
    for key in sender.exports.delivered(*WORD.unpack_from(world.memory, offset)):
        del sender.lent[key]


def _carry_out(world: World, sender: Sender, operation: Operation) -> Any:
    if sender.wire.revoked:
        raise SessionFenced
    match operation:
        case Read(offset, length):
            return bytes(world.memory[offset : offset + length])
        case CompareAndSwap():
            return _swap(world, operation)
        case Guarded(swap, chain):
            found = _swap(world, swap)
            if found == swap.expected:
                _post(world, sender.wire, chain)
            return found
        case Claim(length):
            return Claims(world.consumer.geometry)(world.memory, sender.session, length)
        case Chain():
            return _post(world, sender.wire, operation)
        case Pause():
            return float(world.step)
        case _:
            raise AssertionError(f"a producer does not use {operation!r}")


def _swap(world: World, swap: CompareAndSwap) -> Any:
    if world.step > swap.not_after:
        return EXPIRED
    (found,) = WORD.unpack_from(world.memory, swap.offset)
    if found == swap.expected:
        WORD.pack_into(world.memory, swap.offset, swap.desired)
    return found


def _post(world: World, wire: Wire, chain: Chain) -> None:
    for write in chain.writes:
        data = b"".join(write.buffers)
        pieces = [(write.offset + at, data[at : at + 64]) for at in range(0, len(data), 64)]
        world.rng.shuffle(pieces)
        wire.posted.append(pieces)


def _land_one(world: World) -> None:
    waiting = [wire.posted for wire in world.wires.values() if wire.posted]
    if not waiting:
        return
    queue = world.rng.choice(waiting)
    if queue[0]:
        offset, data = queue[0].pop()
        world.memory[offset : offset + len(data)] = data
    if not queue[0]:
        queue.popleft()


def _revoke(world: World, session: int) -> None:
    wire = world.wires.pop(session, None)
    if wire is not None:
        wire.revoked = True
        wire.posted.clear()


# The consumer.


def _consumer_step(world: World) -> None:
    rng = world.rng
    if world.polling is None:
        if world.held and rng.random() < 0.3:
            _release_one(world)
            return
        world.polling = world.consumer.poll(float(world.step))
        world.poll_operation = next(world.polling)
        return
    assert world.poll_operation is not None
    if isinstance(world.poll_operation, Fence | Pull) and rng.random() < 0.7:
        if world.held and rng.random() < 0.3:
            _release_one(world)
        return
    try:
        world.poll_operation = world.polling.send(_own_operation(world, world.poll_operation))
    except StopIteration:
        world.polling = world.poll_operation = None
    while world.consumer.handed:
        _judge(world, world.consumer.handed.pop())


def _own_operation(world: World, operation: Operation) -> Any:
    match operation:
        case Load(offset, length):
            return memoryview(world.memory)[offset : offset + length]
        case Store(offset, data):
            world.memory[offset : offset + len(data)] = data
        case Fence(sessions):
            for session in sessions:
                _revoke(world, session)
        case Pull(session, key, _):
            return _pull(world, session, key)
        case _:
            raise AssertionError(f"a consumer does not use {operation!r}")
    return None


def _pull(world: World, session: int, key: bytes) -> bytes | None:
    """What the session's sender lends, if it still does and nothing happens to it on the way."""
    wire = world.wires.get(session)
    lent = next((sender.lent.get(key) for sender in world.senders if sender.wire is wire), None)
    if lent and world.rng.random() < _DAMAGED * (world.drawn.cut > 0):
        return bytes([lent[0] ^ 1]) + lent[1:]
    return lent


def _content(world: World, delivery: Delivery) -> Bytes:
    """The bytes of a message that was handed over."""
    if delivery.content is not None:
        return delivery.content
    return world.memory[delivery.offset : delivery.offset + delivery.length]


def _judge(world: World, delivery: Delivery) -> None:
    sender = next(sender for sender in world.senders if sender.name == delivery.identity)
    if delivery.number != sender.handed:
        raise world.fail(1, f"{delivery!r} is handed over, {sender.handed} comes next")
    payload = bytes(_content(world, delivery))
    if payload != sender.messages[delivery.number]:
        raise world.fail(2, f"{delivery!r} is handed over with other bytes")
    sender.handed += 1
    world.held.append((delivery, payload))


def _release_one(world: World) -> None:
    delivery, payload = world.held.pop(world.rng.randrange(len(world.held)))
    if _content(world, delivery) != payload:
        raise world.fail(2, f"{delivery!r} has changed while it was held")
    for operation in world.consumer.release(delivery):
        assert isinstance(operation, Store)
        _own_operation(world, operation)


# The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Carry the command out; returns its exit status."""
    start = time.perf_counter()
    steps = 0
    failed = 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        try:
            steps += run_schedule(seed)
        except ScheduleFailed as failure:
            failed += 1
            print(f"seed {seed}: {failure}")
    seconds = time.perf_counter() - start
    print(f"{arguments.seeds} seeds, {steps} steps, {failed} failed, {seconds:.1f} s")
    return 1 if failed else 0
