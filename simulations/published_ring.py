"""Two published queues over one-sided memory, coded as programs, and how they fail.

**The ring with a lock** (as a system paper describes it). A sender takes a lock word by
compare-and-swap, reads heads and tails, writes its message (a header with a checksum of the header,
then the payload), sets the busy bit of a size entry, moves the tails, and frees the lock. A lock
that is held for too long is *stolen*: its holder is taken for dead. The receiver looks at the size entry at
its head; a message whose header does not match is dropped; it clears the busy bit and moves the heads.

A lock with a timeout protects nobody: the holder may only be slow. What it had not yet done it does
later, over the bytes, the size entry or the tails of whoever stole the lock.

**The queue that adds last.** A sender reads the tail, writes the slot, and only then adds to the tail.
Two senders that read the same tail write the same slot, and then the tail has moved by two.

Each is explored like our own ring, breadth first, so the traces are shortest ones. Nothing dies and
nothing is delayed on the wire: two senders that are only slow at the wrong moment are enough.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

from attrs import evolve, field, frozen

from transports.operations import (
    Chain,
    CompareAndSwap,
    FetchAndAdd,
    Load,
    Operation,
    Pause,
    PauseReason,
    Program,
    Read,
    Store,
    Write,
)

WORD_BYTES: Final = 8
SENDERS: Final = "AB"

Words: TypeAlias = tuple[int, ...]


def _word(value: int) -> bytes:
    return value.to_bytes(WORD_BYTES, "little")


def _words(image: bytes) -> list[int]:
    return [int.from_bytes(image[at : at + WORD_BYTES], "little") for at in range(0, len(image), WORD_BYTES)]


def _put(place: int, value: int) -> Chain:
    return Chain((Write(place * WORD_BYTES, (_word(value),)),))


@frozen
class Queue:
    """A queue to be explored: its memory, and its programs."""

    name: str
    places: tuple[str, ...]
    """What each word of the memory is called."""
    send: Callable[[int], Program[None]]
    """Sends the one message of a sender."""
    receive: Callable[[int], Program[tuple[int, ...] | None]]
    """Returns the payload of the next message, given how many were taken before."""


# The ring with a lock. Two messages fit; each has a header and two words of payload.

_LOCK, _HEAD, _TAIL = 0, 1, 2
_SIZES: Final = 3
_BYTES: Final = 5
_ENTRIES: Final = 2
_MESSAGE: Final = 3
_BUSY: Final = 1 << 32


def _payload(sender: int) -> tuple[int, int]:
    return 10 * (sender + 1) + 1, 10 * (sender + 1) + 2


def _header(sender: int) -> int:
    """Sender and length, with a checksum over both: it says nothing about the payload."""
    fields = (sender + 1) << 8 | _MESSAGE
    return fields << 8 | _checksum(fields)


def _checksum(fields: int) -> int:
    return (fields >> 8 ^ fields ^ 0x5A) & 0xFF


def _is_intact(header: int) -> bool:
    return header & 0xFF == _checksum(header >> 8)


def _send_under_lock(sender: int) -> Program[None]:
    mine = sender + 1
    expected = 0
    while (found := (yield CompareAndSwap(_LOCK * WORD_BYTES, expected, mine))) != expected:
        yield Pause(PauseReason.CONTENDED, 1)
        # Whoever holds it has had its time: it is taken for dead.
        expected = found
    image = yield Read(_HEAD * WORD_BYTES, 2 * WORD_BYTES)
    head, tail = _words(image)
    assert tail - head < _ENTRIES, "two messages of two senders always fit"
    entry = tail % _ENTRIES
    at = _BYTES + entry * _MESSAGE
    for place, value in enumerate((_header(sender), *_payload(sender)), start=at):
        yield _put(place, value)
    yield _put(_SIZES + entry, _BUSY | _MESSAGE)
    yield _put(_TAIL, tail + 1)
    yield CompareAndSwap(_LOCK * WORD_BYTES, mine, 0)


def _receive_sizes(taken: int) -> Program[tuple[int, ...] | None]:
    entry = taken % _ENTRIES
    (size,) = _words((yield Load((_SIZES + entry) * WORD_BYTES, WORD_BYTES)))
    if not size & _BUSY:
        return None
    at = _BYTES + entry * _MESSAGE
    header, *payload = _words((yield Load(at * WORD_BYTES, _MESSAGE * WORD_BYTES)))
    yield Store((_SIZES + entry) * WORD_BYTES, _word(0))
    yield Store(_HEAD * WORD_BYTES, _word(taken + 1))
    return tuple(payload) if _is_intact(header) else ()


LOCKED_RING: Final = Queue(
    "the ring with a lock that is stolen after a timeout",
    (
        "the lock",
        "the head",
        "the tail",
        *(f"size entry {entry}" for entry in range(_ENTRIES)),
        *(
            f"{part} of message {entry}"
            for entry in range(_ENTRIES)
            for part in ("the header", "payload word 0", "payload word 1")
        ),
    ),
    _send_under_lock,
    _receive_sizes,
)


# The queue that adds last: a tail, and slots of two words.

_SLOT_COUNT: Final = 2
_SLOT_WORDS: Final = 2


def _send_then_add(sender: int) -> Program[None]:
    (tail,) = _words((yield Read(0, WORD_BYTES)))
    at = 1 + tail % _SLOT_COUNT * _SLOT_WORDS
    for place, value in enumerate(_payload(sender), start=at):
        yield _put(place, value)
    yield FetchAndAdd(0, 1)


def _receive_up_to_tail(taken: int) -> Program[tuple[int, ...] | None]:
    (tail,) = _words((yield Load(0, WORD_BYTES)))
    if taken >= tail:
        return None
    at = 1 + taken % _SLOT_COUNT * _SLOT_WORDS
    payload = _words((yield Load(at * WORD_BYTES, _SLOT_WORDS * WORD_BYTES)))
    if not any(payload):
        return None  # the tail is ahead of what was written: the message is taken to be on its way
    for place in range(at, at + _SLOT_WORDS):
        yield Store(place * WORD_BYTES, _word(0))
    return tuple(payload)


ADDING_QUEUE: Final = Queue(
    "the queue that writes the slot and then adds to the tail",
    (
        "the tail",
        *(f"word {word} of slot {slot}" for slot in range(_SLOT_COUNT) for word in range(_SLOT_WORDS)),
    ),
    _send_then_add,
    _receive_up_to_tail,
)


# Exploring them.


@frozen
class World:
    """A state: the memory, what every program has seen so far, and what was delivered."""

    words: Words
    senders: tuple[tuple[Any, ...] | None, ...] = field(default=((), ()))
    """Outcomes so far of each sender's program; ``None``: it has returned."""
    receiver: tuple[Any, ...] | None = None
    """Outcomes so far of the receiver's program; ``None``: it is not looking."""
    taken: int = 0
    delivered: frozenset[int] = frozenset()


@frozen
class Failure:
    """How a queue failed: the shortest trace, and the promise it breaks."""

    queue: str
    promise: int
    what: str
    trace: tuple[str, ...]
    states: int


def find_failure(queue: Queue, promise: int, *, states_max: int = 1_000_000) -> Failure | None:
    """The shortest way to breaking this promise (1 or 2); ``None`` if there is none."""
    start = World((0,) * len(queue.places))
    parents: dict[World, tuple[World, str] | None] = {start: None}
    order = [start]
    for world in order:
        assert len(order) <= states_max, f"{queue.name} has more than {states_max} states"
        for sentence, after in _moves(queue, world):
            if isinstance(after, World):
                if after not in parents:
                    parents[after] = (world, sentence)
                    order.append(after)
                continue
            broken, what = after
            if broken == promise:
                return Failure(queue.name, promise, what, (*_way(parents, world), sentence), len(order))
    return None


def _way(parents: dict[World, tuple[World, str] | None], world: World) -> tuple[str, ...]:
    way = []
    step = parents[world]
    while step is not None:
        world, sentence = step
        way.append(sentence)
        step = parents[world]
    return tuple(reversed(way))


def _moves(queue: Queue, world: World) -> Iterator[tuple[str, World | tuple[int, str]]]:
    for sender, outcomes in enumerate(world.senders):
        if outcomes is not None:
            yield _send_step(queue, world, sender, outcomes)
    yield _receive_step(queue, world)


def _send_step(queue: Queue, world: World, sender: int, outcomes: tuple[Any, ...]) -> tuple[str, World]:
    operation = _next_operation(queue.send(sender), outcomes)
    assert operation is not None
    words, outcome, doing = _carry_out(queue, world.words, operation)
    after: tuple[Any, ...] | None = (*outcomes, outcome)
    if _next_operation(queue.send(sender), (*outcomes, outcome)) is None:
        after = None
        doing += ", and has sent its message"
    senders = tuple(after if at == sender else other for at, other in enumerate(world.senders))
    return f"{SENDERS[sender]} {doing}.", evolve(world, words=words, senders=senders)


def _receive_step(queue: Queue, world: World) -> tuple[str, World | tuple[int, str]]:
    outcomes = world.receiver or ()
    operation = _next_operation(queue.receive(world.taken), outcomes)
    assert operation is not None
    words, outcome, doing = _carry_out(queue, world.words, operation)
    sentence = f"The receiver {doing}."
    seen = (*outcomes, outcome)
    program = queue.receive(world.taken)
    try:
        _replay(program, seen)
    except StopIteration as stop:
        after = evolve(world, words=words, receiver=None)
        return _judged(after, stop.value, sentence)
    return sentence, evolve(world, words=words, receiver=seen)


def _judged(
    world: World, payload: tuple[int, ...] | None, sentence: str
) -> tuple[str, World | tuple[int, str]]:
    if payload is None:
        unfinished = any(outcomes is not None for outcomes in world.senders)
        missing = [SENDERS[at] for at in range(len(SENDERS)) if at not in world.delivered]
        if unfinished or not missing:
            return sentence, world
        lost = f"everything was sent, nothing more comes, and the message of {missing[0]} was never delivered"
        return sentence, (1, lost)
    if payload == ():
        return sentence, evolve(world, taken=world.taken + 1)
    sender = next((at for at in range(len(SENDERS)) if _payload(at) == payload), None)
    if sender is None:
        mixed = " and ".join(map(hex, payload))
        return sentence, (2, f"a message is delivered with the payload words {mixed}, of two senders")
    if sender in world.delivered:
        return sentence, (1, f"the message of {SENDERS[sender]} is delivered again")
    return sentence, evolve(world, taken=world.taken + 1, delivered=world.delivered | {sender})


def _next_operation(program: Program[Any], outcomes: tuple[Any, ...]) -> Operation | None:
    try:
        return _replay(program, outcomes)
    except StopIteration:
        return None


def _replay(program: Program[Any], outcomes: tuple[Any, ...]) -> Operation:
    operation = next(program)
    for outcome in outcomes:
        operation = program.send(outcome)
    return operation


def _carry_out(queue: Queue, words: Words, operation: Operation) -> tuple[Words, Any, str]:
    """The memory after an operation, its outcome, and both in words."""
    match operation:
        case Read(offset, length) | Load(offset, length):
            places = range(offset // WORD_BYTES, (offset + length) // WORD_BYTES)
            found = b"".join(_word(words[place]) for place in places)
            said = ", ".join(f"{queue.places[place]} is {words[place]:#x}" for place in places)
            return words, found, f"reads: {said}"
        case CompareAndSwap(offset, expected, desired):
            return _swapped(queue, words, offset // WORD_BYTES, expected, desired)
        case FetchAndAdd(offset, addend):
            place = offset // WORD_BYTES
            total = words[place] + addend
            return _changed(words, place, total), words[place], f"adds: {queue.places[place]} is now {total}"
        case Chain((Write(offset, (data,)),)) | Store(offset, data):
            place = offset // WORD_BYTES
            value = int.from_bytes(data, "little")
            return _changed(words, place, value), None, f"writes {value:#x} as {queue.places[place]}"
        case Pause():
            return words, 0.0, "has waited for its timeout"
        case _:
            raise AssertionError(f"these programs do not use {operation!r}")


def _swapped(queue: Queue, words: Words, place: int, expected: int, desired: int) -> tuple[Words, int, str]:
    found = words[place]
    where = queue.places[place]
    if found != expected:
        return words, found, f"cannot swap {where}: it is {found}"
    if expected and desired:
        return _changed(words, place, desired), found, f"steals {where} from {SENDERS[expected - 1]}"
    return _changed(words, place, desired), found, f"{'takes' if desired else 'frees'} {where}"


def _changed(words: Words, place: int, value: int) -> Words:
    return (*words[:place], value, *words[place + 1 :])
