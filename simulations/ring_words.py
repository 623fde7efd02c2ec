"""A trace of the ring's explorer in words: one sentence for each step."""

from typing import Final

from simulations.explore import Finding, Step
from simulations.ring_cells import HEAD_CELL, TAIL_CELL, Fetch, Put, Reserve, Revoke, Swap
from simulations.ring_consumer import LocalConsumer, Poll, Release
from simulations.ring_model import RingModel
from simulations.ring_state import NAMES
from transports.ring.layout import unpack_position


def trace_in_words(model: RingModel, finding: Finding) -> list[str]:
    """The finding's trace, numbered, with what is wrong at its end."""
    lines = [f"{place:3}. {_sentence(model, step)}" for place, step in enumerate(finding.trace, start=1)]
    if finding.violation is not None:
        lines.append(f"     Promise {finding.violation.promise} is broken: {finding.violation.what}.")
    elif finding.stuck:
        lines.append("     Promise 4 is broken: from here no finished state can be reached.")
    return lines


def _sentence(model: RingModel, step: Step) -> str:
    match step.label:
        case ("land" | "damage" as kind, int(session), int(cell)):
            damaged = ", damaged" if kind == "damage" else ""
            return f"A write posted by session {session} lands{damaged}: {model.cells.describe(cell)}."
        case ("glimpse",):
            return "The consumer pulls: it has read what is lent, and not yet whose it is."
        case ("glimpse-damaged",):
            return "The consumer pulls: what it has read was damaged on the way."
        case ("pull",):
            return f"The pull is over{_handing(model, step)}."
        case ("retire",):
            return "The region gets other memory; all sessions end."
        case ("lend", int(producer)):
            return f"{NAMES[producer]} lends its next message."
        case ("look", int(producer)):
            return f"{NAMES[producer]} reads what was delivered, and takes back what it has lent."
        case ("cut", int(session)):
            return f"The connection of session {session} is lost; the consumer is told."
        case (str(kind), int(producer)) if kind in _PRODUCER:
            return _producer_sentence(model, step, kind, producer)
        case _:
            return _consumer_sentence(model, step)


_PRODUCER: Final = frozenset(
    {"crash", "read", "read-tail", "read-head", "expire", "lose", "win", "win-crash", "refused", "reconnect"}
)


def _producer_sentence(model: RingModel, step: Step, kind: str, producer: int) -> str:
    name = NAMES[producer]
    match kind:
        case "crash":
            return f"{name} dies."
        case "read-tail":
            return f"{name} begins to read: {_tail_and_head(model, step)}; only the tail was fetched."
        case "read-head":
            return f"{name} begins to read: {_tail_and_head(model, step)}; only the head was fetched."
        case "read":
            return f"{name} reads {_tail_and_head(model, step)}."
        case "expire":
            return f"{name}'s snapshot is too old to be used: it will read again."
        case "lose":
            return f"{name} loses the swap: the tail has moved."
        case "refused":
            return f"{name} claims; there is no room."
        case "reconnect":
            return f"{name} learns that its session is gone, and opens a new one."
        case _:
            number = model.everybody.values[step.before[2]][producer]
            local = model.producers[producer].all[number]
            assert isinstance(local.step, Swap | Reserve)
            swap = model.as_swap(step.before, local, local.step)
            _, sequence, _ = unpack_position(model.cells.word(swap.expected))
            _, _, end = unpack_position(model.cells.word(swap.desired))
            granules = [str((end - back) % model.setting.granules) for back in range(local.granules, 0, -1)]
            message = f"{name}.{local.books.next_number}"
            reserved = f"slot {sequence % model.setting.slots}, {_counted('payload granule', granules)}"
            end_of_it = ", and dies before all is posted" if kind == "win-crash" else ""
            how = "wins the swap for" if isinstance(local.step, Swap) else "claims room for"
            return f"{name} {how} {message}: {reserved}{end_of_it}."


def _counted(noun: str, items: list[str]) -> str:
    return f"{noun}{'s' if len(items) > 1 else ''} {' and '.join(items)}"


def _tail_and_head(model: RingModel, step: Step) -> str:
    memory = model.memories.values[step.before[0]]
    _, tail, _ = unpack_position(model.cells.word(memory[TAIL_CELL]))
    _, head, _ = unpack_position(model.cells.word(memory[HEAD_CELL]))
    return f"tail {tail} and head {head}"


def _consumer_sentence(model: RingModel, step: Step) -> str:
    before = model.consumer.all[step.before[1]]
    match step.label:
        case ("poll",):
            local, start = model.consumer.call(before, Poll()), "The consumer polls"
        case ("suspect",):
            local, start = (
                model.consumer.call(before, Poll(late=True)),
                "The lease is over; the consumer polls",
            )
        case ("release", int(sequence)):
            delivery = next(held for held in before.held if held.sequence == sequence)
            start = f"The consumer releases {delivery.identity}.{delivery.number}"
            if before.call is not None:
                return f"{start} while it waits for the fence."
            local = model.consumer.call(before, Release(sequence))
        case _:
            local, start = before, "The consumer goes on"
    return f"{start}: {_doing(model, step, local)}{_handing(model, step)}."


def _doing(model: RingModel, step: Step, local: LocalConsumer) -> str:
    match local.step:
        case Fetch(cells):
            memory = model.memories.values[step.before[0]]
            if cells[0] == TAIL_CELL:
                _, tail, _ = unpack_position(model.cells.word(memory[TAIL_CELL]))
                return f"the tail is {tail}"
            if cells[0] >= model.cells.first_granule:
                return f"it looks at {' and '.join(model.cells.describe(cell) for cell in cells)}"
            slot = (cells[0] - model.cells.first_slot) // 2
            if model.setting.torn_loads and local.half is None:
                return f"it fetches the body of slot {slot}"
            state = "has a" if memory[cells[0]] else "has no"
            return f"slot {slot} {state} commit word"
        case Put((cell, number)):
            return _storing(model, cell, number)
        case Revoke(sessions):
            return f"it fences {_counted('session', [str(session) for session in sessions])}"
        case _:
            return "there is nothing to store"


def _storing(model: RingModel, cell: int, number: int) -> str:
    where = model.cells.describe(cell)
    word = model.cells.word(number)
    if cell == HEAD_CELL:
        _, head, _ = unpack_position(word)
        return f"it publishes head {head}"
    if cell < model.cells.first_slot:
        return f"it stores {word} in the {where}"
    return f"it clears the {where}"


def _handing(model: RingModel, step: Step) -> str:
    if step.after is None:
        return ""
    after = model.consumer.all[step.after[1]]
    return "".join(f"; it hands over {d.identity}.{d.number}" for d in after.handed)
