"""Recovery of one request: whatever nodes die, it ends, as long as some node is left to run it."""

import random
from collections.abc import Mapping

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from onepiece.core.request_record import (
    FINISHED,
    INPUTS,
    QUEUED,
    RUNNING,
    STORE,
    GivenUp,
    Holding,
    Plan,
    Resend,
    RestoreCheckpoint,
    Sending,
    SendInputs,
    StageProgress,
)
from onepiece.requests import EventKind

UID = "r"
CHAIN = Plan({"a": (INPUTS,), "b": ("a",), "c": ("b",)}, "c")
KEPT = Plan(CHAIN.sources, CHAIN.output, checkpoints=frozenset({"a", "b"}))
DIAMOND = Plan(
    {"split": (INPUTS,), "left": ("split",), "right": ("split", INPUTS), "merge": ("left", "right")}, "merge"
)
WIDE = Plan(
    {
        "text": (INPUTS,),
        "image": (INPUTS,),
        "latents": (INPUTS,),
        "denoise": ("text", "image", "latents", INPUTS),
        "decode": ("denoise",),
    },
    "decode",
    checkpoints=frozenset({"denoise"}),
)


def progress_of(plan: Plan, lives_max: int = 99, resends_max: int = 99) -> StageProgress:
    """A fresh request of a plan; bounds that are not reached unless asked for."""
    return StageProgress(UID, plan, lives_max, resends_max)


def sent(answer: list[Sending] | GivenUp) -> list[Sending]:
    """The sendings of an answer that gives nothing up."""
    assert not isinstance(answer, GivenUp)
    return answer


def test_inputs_go_to_every_entry_at_first() -> None:
    """A new request asks for its inputs to be sent to each stage that takes some, once."""
    progress = progress_of(WIDE)
    targets = {each.target for each in sent(progress.advance()) if isinstance(each, SendInputs)}
    assert targets == {"text", "image", "latents", "denoise"}
    assert progress.advance() == []


def finish(progress: StageProgress, stage: str, node: str, **heading: str) -> None:
    """A stage ran on a node and sent its output on."""
    progress.report(stage, EventKind.STAGE_STARTED, node)
    progress.report(stage, EventKind.STAGE_FINISHED, node)
    progress.head(heading, ())


def test_dead_decoder_costs_no_finished_denoise() -> None:
    """When the node that runs the last stage dies, the one before only sends its output again."""
    progress = progress_of(CHAIN)
    progress.advance()
    finish(progress, "a", "n1", b="n2")
    finish(progress, "b", "n2", c="n3")
    progress.report("c", EventKind.STAGE_STARTED, "n3")
    assert progress.lose_nodes(frozenset({"n3"})) is None
    assert progress.advance() == [Resend(UID, "b", "c", "n2", 2)]
    assert progress.advance() == []


def test_both_sides_lost_goes_back_to_what_is_left() -> None:
    """When a stage and the retainer of its inputs die together, the run goes back to the inputs."""
    progress = progress_of(CHAIN)
    progress.advance()
    finish(progress, "a", "n1", b="n2")
    finish(progress, "b", "n2", c="n3")
    progress.lose_nodes(frozenset({"n2", "n3"}))
    assert progress.advance() == [Resend(UID, "a", "b", "n1", 2)]
    progress.lose_nodes(frozenset({"n1"}))
    assert progress.advance() == [SendInputs(UID, "a", 3)]


def test_checkpoint_stands_in_for_a_dead_retainer() -> None:
    """The output of a checkpointed stage comes from the result store when its node is dead."""
    progress = progress_of(WIDE)
    progress.advance()
    finish(progress, "denoise", "n1", decode="n2")
    progress.report("decode", EventKind.STAGE_STARTED, "n2")
    progress.lose_nodes(frozenset({"n1", "n2"}))
    assert progress.advance() == [RestoreCheckpoint(UID, "denoise", "decode", 2)]


def test_checkpoint_that_no_store_has_is_made_again() -> None:
    """When the checkpoint is nowhere its stage runs again; the one of that run is believed in anew."""
    plan = Plan(CHAIN.sources, CHAIN.output, checkpoints=frozenset({"b"}))
    progress = progress_of(plan)
    progress.advance()
    finish(progress, "a", "n1", b="n2")
    finish(progress, "b", "n2", c="n3")
    progress.report("c", EventKind.STAGE_STARTED, "n3")
    progress.lose_nodes(frozenset({"n2", "n3"}))
    assert progress.advance() == [RestoreCheckpoint(UID, "b", "c", 2)]
    progress.lose_checkpoint("b", "c")
    assert progress.advance() == [Resend(UID, "a", "b", "n1", 3)]
    finish(progress, "b", "n4", c="n5")
    progress.lose_nodes(frozenset({"n4", "n5"}))
    assert progress.advance() == [RestoreCheckpoint(UID, "b", "c", 4)]


def test_store_that_dies_while_it_restores_is_replaced() -> None:
    """A checkpoint on its way from a store node that dies is asked for again; late answers change nothing."""
    plan = Plan(CHAIN.sources, CHAIN.output, checkpoints=frozenset({"b"}))
    progress = progress_of(plan)
    progress.advance()
    finish(progress, "a", "n1", b="n2")
    finish(progress, "b", "n2", c="n3")
    progress.lose_nodes(frozenset({"n2", "n3"}))
    progress.advance()
    progress.await_checkpoint("b", "c", "store-1", ())
    assert progress.advance() == []
    progress.lose_nodes(frozenset({"store-1"}))
    assert progress.advance() == [RestoreCheckpoint(UID, "b", "c", 3)]
    progress.await_checkpoint("b", "c", "store-1", {"store-1"})
    assert progress.advance() == [RestoreCheckpoint(UID, "b", "c", 4)]
    progress.head({"c": "n4"}, ())
    progress.lose_checkpoint("b", "c")
    assert progress.advance() == [], "what no store had any more is on its way already"


def test_unretained_edge_of_a_checkpointed_stage_comes_from_the_store() -> None:
    """What is retained by no node can still be had from the stores."""
    edge = frozenset({("b", "c")})
    progress = progress_of(Plan(CHAIN.sources, CHAIN.output, edge, checkpoints=frozenset({"b"})))
    progress.advance()
    finish(progress, "a", "n1", b="n2")
    finish(progress, "b", "n2", c="n3")
    progress.lose_nodes(frozenset({"n3"}))
    assert progress.advance() == [RestoreCheckpoint(UID, "b", "c", 2)]
    progress.lose_checkpoint("b", "c")
    assert isinstance(progress.advance(), GivenUp)


def test_result_comes_from_no_checkpoint() -> None:
    """The last stage's output is durable in the result store or nowhere else: it runs again."""
    progress = progress_of(Plan(CHAIN.sources, CHAIN.output, checkpoints=frozenset({"b", "c"})))
    progress.advance()
    finish(progress, "a", "n1", b="n2")
    finish(progress, "b", "n2", c="n3")
    finish(progress, "c", "n3")
    progress.lose_nodes(frozenset({"n2", "n3"}))
    assert progress.advance() == [RestoreCheckpoint(UID, "b", "c", 2)]


def test_unretained_edge_ends_in_a_loss_that_is_named() -> None:
    """What was sent at most once and is lost is given up, with the edge in the reason."""
    plan = Plan(CHAIN.sources, CHAIN.output, unretained=frozenset({("a", "b")}))
    progress = progress_of(plan)
    progress.advance()
    finish(progress, "a", "n1", b="n2")
    progress.lose_nodes(frozenset({"n2"}))
    answer = progress.advance()
    assert isinstance(answer, GivenUp)
    assert "a" in answer.reason
    assert not answer.is_poison


def test_poison_takes_two_nodes_and_no_third() -> None:
    """A stage that has killed two nodes is not given a third (fault 21)."""
    progress = progress_of(CHAIN, lives_max=2)
    progress.advance()
    progress.report("a", EventKind.STAGE_STARTED, "n1")
    assert progress.lose_nodes(frozenset({"n1"})) is None
    assert progress.advance() == [SendInputs(UID, "a", 2)]
    progress.report("a", EventKind.STAGE_STARTED, "n2")
    given_up = progress.lose_nodes(frozenset({"n2"}))
    assert given_up is not None
    assert given_up.is_poison
    assert given_up.stage == "a"


def test_new_owner_goes_on_from_what_nodes_hold() -> None:
    """An adopted request runs nothing again that some node still has."""
    progress = progress_of(CHAIN)
    progress.adopt([Holding("n1", {}, ("a",)), Holding("n2", {"b": RUNNING}, ())], 1)
    assert progress.advance() == []
    fresh = progress_of(CHAIN)
    fresh.adopt([Holding("n1", {}, ("a",))], 1)
    assert fresh.advance() == [Resend(UID, "a", "b", "n1", 513)]
    kept = Plan(CHAIN.sources, CHAIN.output, checkpoints=frozenset({"b"}))
    stored = progress_of(kept)
    stored.adopt([Holding("store-1", {}, (), ("b",)), Holding("n1", {}, ("a",))], 1)
    assert stored.advance() == [RestoreCheckpoint(UID, "b", "c", 513)]
    ahead = progress_of(kept)
    ahead.adopt([Holding("store-1", {}, (), ("b",)), Holding("n3", {"c": RUNNING})], 1)
    assert ahead.advance() == []
    behind = progress_of(kept)
    behind.adopt([Holding("n2", {"b": RUNNING}), Holding("store-1", {}, (), ("b",))], 1)
    assert behind.advance() == []
    nothing = progress_of(CHAIN)
    nothing.adopt([], 1)
    assert nothing.advance() == [SendInputs(UID, "a", 513)]


@define
class Node:
    """What one abstract node holds."""

    inputs: dict[str, set[str]] = field(factory=dict)
    ready: set[str] = field(factory=set)
    retained: set[tuple[str, str]] = field(factory=set)
    untaken: dict[str, set[str]] = field(factory=dict)


@define
class Cluster:
    """Abstract nodes, messages and reports under way, and the owner's view of one request.

    Everything under way may take any time; what a dead node sent and was not taken is lost.
    """

    plan: Plan
    rng: random.Random
    progress: StageProgress
    nodes: dict[str, Node] = field(factory=dict)
    messages: list[tuple[str, str, str, str]] = field(factory=list)
    """Source, target, the node it comes from, the node it goes to."""
    reports: list[tuple[str, EventKind, str, Mapping[str, str]]] = field(factory=list)
    stored: bool = False
    given_up: GivenUp | None = None
    joins: dict[str, str] = field(factory=dict)
    born: int = 0
    checkpoints_lost: float = 0.0
    """How many of the checkpoints that are asked for no store node has."""
    dead: set[str] = field(factory=set)

    def start(self, count: int) -> None:
        """Begin with so many nodes."""
        for _ in range(count):
            self.add_node()
        self.carry_out(self.progress.advance())

    def add_node(self) -> None:
        """A new node joins."""
        self.born += 1
        self.nodes[f"n{self.born}"] = Node()

    def place(self, target: str) -> str:
        """Where a target's inputs go: all of one target to the same node while that lives."""
        if self.joins.get(target) not in self.nodes:
            self.joins[target] = self.rng.choice(sorted(self.nodes))
        return self.joins[target]

    def carry_out(self, answer: list[Sending] | GivenUp) -> None:
        """Do what the owner wants."""
        if isinstance(answer, GivenUp):
            self.given_up = answer
            return
        for sending in answer:
            match sending:
                case SendInputs(target=target):
                    self.send(INPUTS, target, "proxy")
                case RestoreCheckpoint(source=source, target=target):
                    if self.rng.random() < self.checkpoints_lost:
                        self.progress.lose_checkpoint(source, target)
                        self.carry_out(self.progress.advance())
                    else:
                        self.progress.await_checkpoint(source, target, "proxy", self.dead)
                        self.send(source, target, "proxy")
                case Resend(source=source, target=target, node_id=node_id):
                    node = self.nodes.get(node_id)
                    if node is None:
                        continue  # its death will be noticed
                    if (source, target) in node.retained:
                        self.send(source, target, node_id)
                    else:
                        self.progress.lose_output(source, target)
                        self.carry_out(self.progress.advance())

    def send(self, source: str, target: str, sender: str) -> None:
        """Put a message on its way; the owner hears at once where inputs go, of others by report."""
        place = self.place(target)
        self.messages.append((source, target, sender, place))
        self.progress.head({target: place}, self.dead)

    def step(self) -> bool:
        """Let one thing happen; False if nothing is left that can."""
        runs = [(name, stage) for name, node in self.nodes.items() for stage in sorted(node.ready)]
        chosen = self.rng.randrange(max(1, len(self.messages) + len(self.reports) + len(runs)))
        if chosen < len(self.messages):
            self.take(*self.messages.pop(chosen))
        elif (chosen := chosen - len(self.messages)) < len(self.reports):
            self.hear(*self.reports.pop(chosen))
        elif (chosen := chosen - len(self.reports)) < len(runs):
            self.run(*runs[chosen])
        else:
            return False
        return True

    def hear(self, stage: str, event: EventKind, node: str, heading: Mapping[str, str]) -> None:
        """The owner hears of a stage."""
        self.progress.report(stage, event, node)
        self.progress.head(heading, self.dead)
        self.carry_out(self.progress.advance())

    def take(self, source: str, target: str, sender: str, place: str) -> None:
        """A message comes in: the last one of its target makes it ready.

        Once all outputs of a stage are taken, what it took itself is retained no longer, anywhere.
        """
        node = self.nodes.get(place)
        if node is None:
            return
        if sender in self.nodes:
            untaken = self.nodes[sender].untaken.get(source, set())
            untaken.discard(target)
            if not untaken:
                for each in self.nodes.values():
                    each.retained = {edge for edge in each.retained if edge[1] != source}
        if target == STORE:
            self.stored = True
            return
        got = node.inputs.setdefault(target, set())
        got.add(source)
        if got == set(self.plan.sources[target]) and target not in node.ready:
            node.ready.add(target)
            self.reports.append((target, EventKind.QUEUED, place, {}))

    def run(self, name: str, stage: str) -> None:
        """A stage runs to its end, retains its output and sends it on; the retainers let go."""
        node = self.nodes[name]
        node.ready.discard(stage)
        node.inputs.pop(stage)
        targets = [STORE] if stage == self.plan.output else []
        targets += [each for each, sources in self.plan.sources.items() if stage in sources]
        heading = {}
        node.untaken[stage] = set(targets)
        for target in targets:
            node.retained.add((stage, target))
            place = heading[target] = self.place(target)
            self.messages.append((stage, target, name, place))
        self.reports.append((stage, EventKind.STAGE_FINISHED, name, heading))

    def kill(self, names: list[str]) -> None:
        """Nodes die with all they hold and all they sent that nobody took; the owner hears of it."""
        for name in names:
            del self.nodes[name]
            self.dead.add(name)
        if not self.nodes:
            self.add_node()
        self.messages = [each for each in self.messages if each[2] in self.nodes or each[2] == "proxy"]
        self.reports = [each for each in self.reports if each[2] in self.nodes]
        given_up = self.progress.lose_nodes(frozenset(names))
        if given_up is not None:
            self.given_up = given_up
        else:
            self.carry_out(self.progress.advance())


@settings(max_examples=300, deadline=None)
@given(
    plan=st.sampled_from([CHAIN, KEPT, DIAMOND, WIDE]),
    seed=st.integers(0, 2**32),
    nodes=st.integers(1, 4),
    deaths=st.integers(0, 6),
    checkpoints_lost=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_request_ends_whatever_nodes_die(
    plan: Plan, seed: int, nodes: int, deaths: int, checkpoints_lost: float
) -> None:
    """With nodes dying at any moments, one or several at once, the result is stored in the end."""
    rng = random.Random(seed)
    cluster = Cluster(plan, rng, progress_of(plan), checkpoints_lost=checkpoints_lost)
    cluster.start(nodes)
    left = deaths
    for _ in range(2000):
        if left and rng.random() < 0.1:
            left -= 1
            victims = rng.sample(sorted(cluster.nodes), rng.randint(1, len(cluster.nodes)))
            cluster.kill(victims)
            cluster.add_node()
        if cluster.stored or cluster.given_up or not cluster.step():
            break
    assert cluster.given_up is None
    assert cluster.stored, "nothing moves any more and there is no result"


def test_states_show_what_the_client_sees() -> None:
    """The states by stage follow the reports, and go back to pending when a stage is lost."""
    progress = progress_of(CHAIN)
    progress.advance()
    progress.report("a", EventKind.QUEUED, "n1")
    assert progress.states()["a"] == QUEUED
    progress.report("a", EventKind.STAGE_STARTED, "n1")
    assert progress.open_stages() == ["a"]
    progress.lose_nodes(frozenset({"n1"}))
    assert progress.states()["a"] == "pending"
    progress.finish()
    assert set(progress.states().values()) == {FINISHED}


@pytest.mark.parametrize("plan", [CHAIN, DIAMOND, WIDE])
def test_resends_are_bounded(plan: Plan) -> None:
    """A stage whose nodes die for ever, even idle ones, is given up after a bounded number of times."""
    progress = progress_of(plan, resends_max=3)
    answer = progress.advance()
    for life in range(10):
        if isinstance(answer, GivenUp):
            break
        progress.head({each.target: f"n{life}" for each in answer}, ())
        assert progress.lose_nodes(frozenset({f"n{life}"})) is None
        answer = progress.advance()
    assert isinstance(answer, GivenUp)
    assert "lost" in answer.reason
