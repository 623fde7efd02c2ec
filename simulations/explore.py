"""Explore every interleaving of a small double ring, and say in words what was found.

Breadth first, so that the trace to a violation is a shortest one. Promises 1, 2, 3 and 5 are checked
in every transition (``ring_model``). Promise 4, that nothing is ever stuck, is a property of the graph:
from every state that was reached a finished state must be reachable, whoever has died. It is checked
backwards from the finished states once all are known.
"""

import gc
from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from attrs import frozen

from simulations.ring_model import RingModel
from simulations.ring_state import Label, Setting, State, Violation


class StateLimitExceeded(Exception):  # noqa: N818  # named as the errors of the transports are
    """More states than the exploration was allowed: the setting is too large."""


@frozen
class Step:
    """One line of a trace."""

    label: Label
    before: State
    after: State | None


@frozen
class Finding:
    """What one exploration has shown."""

    setting: Setting
    states: int
    transitions: int
    violation: Violation | None
    stuck: int
    """States from which no finished state can be reached."""
    trace: tuple[Step, ...]
    """The shortest way to the violation, or to a stuck state."""

    @property
    def holds(self) -> bool:
        """Whether every promise was kept everywhere."""
        return self.violation is None and not self.stuck


def explore(model: RingModel, *, states_max: int = 20_000_000) -> Finding:
    """Visit every state of ``model``, up to the first violation.

    Raises:
        StateLimitExceeded: more than ``states_max`` states.
    """
    # States are tuples of numbers, in which there are no cycles to be found.
    gc.disable()
    try:
        return _explore(model, states_max)
    finally:
        gc.enable()


def _explore(model: RingModel, states_max: int) -> Finding:
    start = model.initial()
    index = {start: 0}
    order = [start]
    parents = array("q", [-1])
    sources = array("q")
    targets = array("q")
    position = 0
    while position < len(order):
        state = order[position]
        for label, after in model.moves(state):
            if isinstance(after, Violation):
                trace = (*_trace(model, order, parents, position), Step(label, state, None))
                return Finding(model.setting, len(order), len(sources), after, 0, trace)
            target = index.get(after)
            if target is None:
                target = index[after] = len(order)
                order.append(after)
                parents.append(position)
            sources.append(position)
            targets.append(target)
        position += 1
        if len(order) > states_max:
            raise StateLimitExceeded(f"{model.setting} has more than {states_max} states")
    can_finish = _can_finish(model, order, sources, targets)
    stuck = len(order) - int(can_finish.sum())
    trace = ()
    if stuck:
        trace = _trace(model, order, parents, int(np.argmin(can_finish)))
    return Finding(model.setting, len(order), len(sources), None, stuck, trace)


def _can_finish(
    model: RingModel, order: Sequence[State], sources: "array[int]", targets: "array[int]"
) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    can_finish = np.fromiter((model.finished(state) for state in order), dtype=np.bool_, count=len(order))
    source = np.frombuffer(sources, dtype=np.int64)
    target = np.frombuffer(targets, dtype=np.int64)
    count = -1
    while (now := int(can_finish.sum())) != count:
        count = now
        can_finish[source[can_finish[target]]] = True
    return can_finish


def _trace(
    model: RingModel, order: Sequence[State], parents: "array[int]", position: int
) -> tuple[Step, ...]:
    path = []
    while position >= 0:
        path.append(position)
        position = parents[position]
    path.reverse()
    steps = []
    for before, after in pairwise(path):
        label = next(label for label, state in model.moves(order[before]) if state == order[after])
        steps.append(Step(label, order[before], order[after]))
    return tuple(steps)
