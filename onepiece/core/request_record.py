"""One request as its owner sees it: where each stage is, and what must be sent for it to go on.

Each stage's output is *retained* where it was computed until the stages that take it have handed on
theirs. So at any moment the owner can say from where a lost stage's inputs can be had again::

    stage is ...                          its inputs come again from ...
    fed by the workflow's inputs          the owner, which keeps them until the request has ended
    fed by a finished stage               the node that retains that stage's output, if it lives,
                                          else the checkpoint, if the stage keeps one and a store has it,
                                          else nowhere: that stage runs again, and so on backwards
    fed by a stage that still runs        that stage, by itself, when it is done

``advance`` walks backwards from the output along this table and returns what is to be sent, nothing
twice. It is the only rule: the first sending, the death of nodes, a lost actor, and the adoption of
another owner's request all end in it.

That a finished stage's checkpoint is there is believed until the store nodes say that it is not: it found
no room, or they died. Then the stage runs again, as one without a checkpoint does.

What it counts: a *life* of a stage is lost when its node dies while the stage runs there; a request
that costs ``lives_max`` nodes is poison and is not tried again. Inputs are sent to a stage again at most
``resends_max`` times, whatever the reason.
"""

from collections.abc import Collection, Container, Mapping
from typing import Final, TypeAlias

from attrs import define, field, frozen

from onepiece.requests import EventKind

INPUTS: Final = "@inputs"
STORE: Final = "@store"
ROUNDS_PER_OWNER: Final = 512
OWNER: Final = "@owner"
"""Where inputs come from; it does not die while it decides."""

PENDING: Final = "pending"
QUEUED: Final = "queued"
RUNNING: Final = "running"
FINISHED: Final = "finished"

_ORDER: Final = {PENDING: 0, QUEUED: 1, RUNNING: 2, FINISHED: 3}
_STATES: Final = {
    EventKind.QUEUED: QUEUED,
    EventKind.STAGE_STARTED: RUNNING,
    EventKind.STAGE_FINISHED: FINISHED,
}


@frozen
class Plan:
    """A workflow's graph as far as its owner needs it.

    ``sources`` names for each graph node where its inputs come from: other nodes, or ``INPUTS``.
    Outputs on ``unretained`` edges (source, target) cannot be had again, but from a checkpoint; those of
    ``checkpoints`` lie on store nodes, beside where they are retained.
    """

    sources: Mapping[str, tuple[str, ...]]
    output: str
    unretained: frozenset[tuple[str, str]] = frozenset()
    checkpoints: frozenset[str] = frozenset()

    @property
    def stages(self) -> tuple[str, ...]:
        """All graph nodes."""
        return tuple(self.sources)

    def sources_of(self, target: str) -> tuple[str, ...]:
        """Where the inputs of a graph node, or of the result store, come from."""
        return (self.output,) if target == STORE else self.sources[target]


@frozen
class SendInputs:
    """The owner sends a graph node what it takes of the workflow's inputs.

    ``attempt`` is the owner's round: it grows with each time that something had to be sent again.
    """

    uid: str
    target: str
    attempt: int


@frozen
class Resend:
    """Ask the node that retains the output of ``source`` to send it to ``target`` (again)."""

    uid: str
    source: str
    target: str
    node_id: str
    attempt: int


@frozen
class RestoreCheckpoint:
    """Have the output of ``source`` sent to ``target`` from the store node that keeps it."""

    uid: str
    source: str
    target: str
    attempt: int


Sending: TypeAlias = SendInputs | Resend | RestoreCheckpoint


@frozen
class Holding:
    """What one node has of a request, as it tells a new owner.

    ``active`` gives for each graph node there whether it is queued or running; ``retained`` lists graph
    nodes whose outputs it retains, ``checkpoints`` those whose outputs it keeps as a store node.
    """

    node_id: str
    active: Mapping[str, str] = field(factory=dict)
    retained: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()


@frozen
class GivenUp:
    """Why a request cannot go on."""

    stage: str
    reason: str
    is_poison: bool


@define
class Progress:
    """One stage of one request.

    ``node_id``: where it is, or is on its way to; for a finished stage where its output is retained.
    None: nowhere. ``awaited``: nodes that were asked to send its inputs and have not said where to.
    """

    state: str = PENDING
    node_id: str | None = None
    awaited: dict[str, str] = field(factory=dict)
    was_fed: bool = False
    resends: int = 0
    lives_lost: int = 0
    lacks_checkpoint: bool = False
    """No store node has the checkpoint of this finished stage."""

    @property
    def is_under_way(self) -> bool:
        """It will run, or runs, if nothing happens to the nodes concerned."""
        return self.state != FINISHED and (self.node_id is not None or bool(self.awaited))


@define
class StageProgress:
    """All stages of one request."""

    uid: str
    plan: Plan
    lives_max: int
    resends_max: int
    round: int = 0
    _stages: dict[str, Progress] = field(init=False)
    _touched: set[str] = field(factory=set)
    """Nodes that have had something of the request, whether or not it counts now."""

    @_stages.default
    def _fresh(self) -> dict[str, Progress]:
        return {stage: Progress() for stage in (*self.plan.stages, STORE)}

    def states(self) -> dict[str, str]:
        """State by graph node."""
        return {stage: progress.state for stage, progress in self._stages.items() if stage != STORE}

    def open_stages(self) -> list[str]:
        """Graph nodes that are queued or running."""
        return [stage for stage, state in self.states().items() if state in {QUEUED, RUNNING}]

    def node_ids(self) -> set[str]:
        """Nodes that may hold something of the request: of a stage that ran twice both are among them."""
        return set(self._touched)

    def knows(self, stage: str) -> bool:
        """Whether the workflow has this graph node."""
        return stage in self._stages and stage != STORE

    def was_done_by(self, stage: str, node_id: str) -> bool:
        """Whether the stage is finished, and it is this node's run of it that counts."""
        progress = self._stages.get(stage)
        return progress is not None and progress.state == FINISHED and progress.node_id == node_id

    def note(self, node_id: str) -> None:
        """This node has had something of the request."""
        self._touched.add(node_id)

    # --- what is reported ----------------------------------------------------------------------

    def report(self, stage: str, kind: EventKind, node_id: str) -> bool:
        """A stage said something; False if it is old news."""
        self.note(node_id)
        progress = self._stages[stage]
        state = _STATES.get(kind)
        if state is None:
            return progress.node_id in {None, node_id}
        is_ahead = _ORDER[state] > _ORDER[progress.state]
        is_elsewhere = _ORDER[state] == _ORDER[progress.state] and progress.node_id != node_id
        if not is_ahead and (state == FINISHED or not is_elsewhere):
            return False  # told twice: each report says all, and so does what comes with the result
        progress.state = state
        progress.node_id = node_id
        progress.awaited.clear()
        progress.lacks_checkpoint = False
        return True

    def head(self, heading: Mapping[str, str], dead: Container[str]) -> None:
        """Outputs are on their way to these nodes, unless the stage has reported from somewhere.

        News that an output went to a node that has died since comes too late: it is lost there.
        """
        self._touched.update(heading.values())
        for target, node_id in heading.items():
            progress = self._stages.get(target)
            if progress is not None and progress.state == PENDING:
                progress.node_id = None if node_id in dead else node_id
                progress.awaited.clear()

    def await_checkpoint(self, source: str, target: str, node_id: str, dead: Container[str]) -> None:
        """This store node has the checkpoint of ``source`` and sends it to ``target``."""
        progress = self._stages[target]
        if progress.awaited.get(source) != STORE:
            return
        if node_id in dead:
            self._lose(progress)
        else:
            progress.awaited[source] = node_id

    def finish(self) -> None:
        """The result is stored."""
        for progress in self._stages.values():
            progress.state = FINISHED

    # --- what is lost --------------------------------------------------------------------------

    def lose_nodes(self, dead: frozenset[str]) -> GivenUp | None:
        """These nodes are gone with all they held; says if the request must not be tried again."""
        touched = False
        for stage, progress in self._stages.items():
            was_there = progress.node_id in dead
            if was_there and progress.state == RUNNING:
                progress.lives_lost += 1
                if progress.lives_lost >= self.lives_max:
                    lost = f"{progress.lives_lost} nodes died while they ran it"
                    return GivenUp(stage, f"{lost}, the last one {progress.node_id}", is_poison=True)
            if was_there or any(node_id in dead for node_id in progress.awaited.values()):
                self._lose(progress)
                touched = True
        if touched or dead:
            self._distrust_untaken(dead)
        return None

    def lose_stage(self, stage: str, node_id: str) -> None:
        """The node lives, but what it had of this stage is lost."""
        progress = self._stages[stage]
        if progress.node_id == node_id and progress.state != FINISHED:
            self._lose(progress)

    def lose_output(self, source: str, target: str) -> None:
        """The node asked for an output does not have it (any more)."""
        self._lose(self._stages[source])
        self._lose(self._stages[target])

    def lose_checkpoint(self, source: str, target: str) -> None:
        """No store node has what ``source`` sent to ``target``; nothing is lost if it has come since."""
        if source in self._stages[target].awaited:
            self._stages[source].lacks_checkpoint = True
            self._lose(self._stages[target])

    def _lose(self, progress: Progress) -> None:
        progress.node_id = None
        progress.awaited.clear()
        if progress.state != FINISHED:
            progress.state = PENDING

    def _distrust_untaken(self, dead: frozenset[str]) -> None:
        """An output that is on its way from a dead node may not have arrived: ask for it again.

        If it had, the receiving actor knows the stage of this request already and drops the second.
        """
        for target, progress in self._stages.items():
            if progress.state != PENDING or progress.node_id is None:
                continue
            for source in self.plan.sources_of(target):
                if source != INPUTS and self._stages[source].node_id is None:
                    self._lose(progress)
                    break

    # --- going on ------------------------------------------------------------------------------

    def advance(self) -> list[Sending] | GivenUp:
        """What must be sent for the request to go on; nothing if all that is needed is under way.

        All that is sent at once belongs to one *round*. Rounds only grow, and outputs inherit the round
        of what they were made from, so that an actor can tell a stage that must run again from an
        input that merely comes twice.
        """
        self.round += 1
        sendings: list[Sending] = []
        given_up = self._need(STORE, sendings, set())
        if not sendings:
            self.round -= 1
        return sendings if given_up is None else given_up

    def _need(self, target: str, sendings: list[Sending], seen: set[str]) -> GivenUp | None:
        """See to it that ``target`` gets to run: what it takes must exist, or come to be.

        One that waits for siblings of inputs that are on their way is looked at, too: those siblings
        may have been lost before they could be sent.
        """
        progress = self._stages[target]
        if target in seen or progress.state != PENDING:
            return None
        seen.add(target)
        sources = self.plan.sources_of(target)
        waits_for = [each for each in sources if each != INPUTS and not self._has_output(each, target)]
        for source in waits_for:
            given_up = self._run_again(target, source, sendings, seen)
            if given_up is not None:
                return given_up
        if progress.is_under_way or len(waits_for) == len(sources):
            return None  # what it lacks is sent by whoever makes it
        return self._feed(target, sendings)

    def _run_again(self, target: str, source: str, sendings: list[Sending], seen: set[str]) -> GivenUp | None:
        """The output of ``source`` is nowhere: unless it is being made, make it."""
        progress = self._stages[source]
        if progress.state == FINISHED:
            if (source, target) in self.plan.unretained:
                return _sent_once(source, target)
            progress.state = PENDING
        return self._need(source, sendings, seen)

    def _feed(self, target: str, sendings: list[Sending]) -> GivenUp | None:
        """Send what exists of the inputs of ``target``; what does not comes when it is made."""
        progress = self._stages[target]
        every = self.plan.sources_of(target)
        sources = [each for each in every if each == INPUTS or self._has_output(each, target)]
        is_first = INPUTS in sources and not progress.was_fed
        progress.was_fed = True
        progress.resends += not is_first
        if progress.resends > self.resends_max:
            return GivenUp(target, f"its inputs were lost {progress.resends} times", is_poison=False)
        for source in sources:
            if (source, target) in self.plan.unretained and not self._has_checkpoint(source, target):
                return _sent_once(source, target)
            sending = self._sending(source, target, self.round)
            progress.awaited[source] = _awaited_from(sending)
            sendings.append(sending)
        return None

    def _sending(self, source: str, target: str, attempt: int) -> Sending:
        if source == INPUTS:
            return SendInputs(self.uid, target, attempt)
        retained_at = self._stages[source].node_id
        if retained_at is None or (source, target) in self.plan.unretained:
            return RestoreCheckpoint(self.uid, source, target, attempt)
        return Resend(self.uid, source, target, retained_at, attempt)

    def _has_output(self, source: str, target: str) -> bool:
        progress = self._stages[source]
        is_somewhere = progress.node_id is not None or self._has_checkpoint(source, target)
        return progress.state == FINISHED and is_somewhere

    def _has_checkpoint(self, source: str, target: str) -> bool:
        """Of what goes to the result store there is none: it is durable there, or not finished."""
        has_any = source in self.plan.checkpoints and not self._stages[source].lacks_checkpoint
        return has_any and target != STORE

    def adopt(self, holdings: Collection[Holding], adoptions: int) -> None:
        """Take what living nodes say they have; what nobody has is pending.

        ``adoptions`` counts how often the request has changed owners; it keeps rounds growing.
        """
        self.round = adoptions * ROUNDS_PER_OWNER
        for holding in holdings:
            self._touched.add(holding.node_id)
            for stage, state in holding.active.items():
                if stage in self._stages:
                    self._stages[stage].state = state
                    self._stages[stage].node_id = holding.node_id
            for stage in holding.retained:
                if stage in self._stages and not self._stages[stage].is_under_way:
                    self._stages[stage].state = FINISHED
                    self._stages[stage].node_id = holding.node_id
        for stage in {stage for holding in holdings for stage in holding.checkpoints}:
            if stage in self.plan.checkpoints and not self._stages[stage].is_under_way:
                self._stages[stage].state = FINISHED


def _awaited_from(sending: Sending) -> str:
    match sending:
        case Resend(node_id=node_id):
            return node_id
        case RestoreCheckpoint():
            return STORE  # until it is known which store node has it
        case SendInputs():
            return OWNER


def _sent_once(source: str, target: str) -> GivenUp:
    return GivenUp(target, f"its input from {source} was lost, and is sent at most once", is_poison=False)
