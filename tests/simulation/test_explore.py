"""The explorer on settings that take seconds; ``python -m simulations explore`` runs the rest."""

import pytest

from simulations import explore_command
from simulations.__main__ import main
from simulations.explore import Finding, StateLimitExceeded, explore
from simulations.published_ring import ADDING_QUEUE, LOCKED_RING, Queue, find_failure
from simulations.ring_consumer import BlindConsumer, ModelConsumer
from simulations.ring_model import RingModel
from simulations.ring_mutants import MUTANTS, Mutant
from simulations.ring_producer import ModelProducer
from simulations.ring_state import Setting, Violation
from simulations.ring_words import trace_in_words
from transports.operations import Program
from transports.ring.layout import Slot

SMALL = [
    Setting(((1, 1),)),
    Setting(((1,), (2,)), crashes=1),
    Setting(((1,), (2,)), crashes=1, guarded=True, near_wrap=True),
    Setting(((1, 1), (2,)), slots=3),
    Setting(((1,), (2,)), crashes=1, claims=True),
    Setting(((1, 1), (2,)), slots=3, guarded=True, claims=True),
    Setting(((1, 2), (3,)), crashes=1, torn_reads=True),
    Setting(((1,), (1,), (1,))),
    Setting(((1,), (1, 1, 1)), granules=4, moduli=(4, 8)),
    Setting(((1,),), suspicions=2, cuts=1, deaths_noticed=True, crashes=1),
    Setting(((0,), (1,)), crashes=1),
    Setting(((0, 0),), cuts=1),
    Setting(((0,),), damages=1, crashes=1, hashes=True, producer=ModelProducer, consumer=ModelConsumer),
    Setting(((1,),), cuts=1, retires=True, hashes=True, producer=ModelProducer, consumer=ModelConsumer),
    Setting(((1,),), damages=1, crashes=1, hashes=True, producer=ModelProducer, consumer=ModelConsumer),
    Setting(((1,),), cuts=1, retires=True, apart=True),
]


def _ids(setting: Setting) -> str:
    return " ".join(str(setting.messages).split())


@pytest.mark.parametrize("setting", SMALL, ids=_ids)
def test_every_promise_holds_in_every_state(setting: Setting) -> None:
    """No interleaving breaks a promise, and every state can still finish."""
    finding = explore(RingModel(setting))
    assert finding.holds, trace_in_words(RingModel(setting), finding)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_found(mutant: Mutant) -> None:
    """A ring with one thing taken away breaks a promise, and the trace says how."""
    model = RingModel(mutant.setting)
    finding = explore(model)
    assert not finding.holds
    words = trace_in_words(model, finding)
    assert len(words) == len(finding.trace) + 1
    assert "is broken" in words[-1]


def test_what_is_sealed_is_taken_over() -> None:
    """The model retires rings that lie apart with the message in the copy, and without it; never its half."""
    model = RingModel(Setting(((1,),), cuts=1, retires=True, apart=True))
    known = {model.initial()}
    waiting, seen = list(known), set()
    while waiting:
        for label, after in model.moves(waiting.pop()):
            assert not isinstance(after, Violation)
            if label[0] == "cut":
                memory = model.memories.values[after[0]]
                granules = memory[model.cells.first_granule : model.cells.first_export]
                seen.add(tuple(number != 0 for number in granules))
            if after not in known:
                known.add(after)
                waiting.append(after)
    assert seen == {(False, False, False), (True, True, False)}


def test_mutants_are_the_ones_that_the_specification_names() -> None:
    """Those of the ring, of what is pulled, of payloads apart, of retired regions, of claims; each once."""
    assert len({mutant.name for mutant in MUTANTS}) == 23


def test_a_trace_is_a_path_from_the_start() -> None:
    """Each step of a trace is a move of the model from where the last one ended."""
    model = RingModel(MUTANTS[0].setting)
    finding = explore(model)
    assert finding.trace[0].before == model.initial()
    for step, following in zip(finding.trace, finding.trace[1:], strict=False):
        assert step.after == following.before
        assert (step.label, step.after) in list(model.moves(step.before))
    assert (finding.trace[-1].label, finding.violation) in list(model.moves(finding.trace[-1].before))


def test_a_consumer_that_never_suspects_is_found_stuck() -> None:
    """Promise 4 is really judged: without recovery a dead producer's slot holds the ring for ever."""

    class NeverSuspects(BlindConsumer):
        def _recover(self, slot: Slot | None, now: float) -> Program[bool]:
            yield from ()
            return False

    finding: Finding = explore(RingModel(Setting(((1,), (1,)), crashes=1, consumer=NeverSuspects)))
    assert finding.violation is None
    assert finding.stuck


def test_a_setting_that_is_too_large_is_refused() -> None:
    """An exploration stops at its bound instead of filling the memory."""
    with pytest.raises(StateLimitExceeded, match="more than 100 states"):
        explore(RingModel(Setting(((1,), (1,)))), states_max=100)


@pytest.mark.parametrize("queue", [LOCKED_RING, ADDING_QUEUE], ids=lambda queue: queue.name)
@pytest.mark.parametrize("promise", [1, 2])
def test_the_published_queues_fail(queue: Queue, promise: int) -> None:
    """Each of them loses a message in one schedule, and delivers a mixture of two in another."""
    failure = find_failure(queue, promise)
    assert failure is not None
    assert failure.promise == promise
    assert failure.trace


def test_the_table_has_a_row_for_each_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in which all holds prints one row per setting and ends with 0."""
    monkeypatch.setattr(explore_command, "QUICK", SMALL[:2])
    assert main(["explore", "--quick", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "2 settings: all promises hold" in printed
    (row,) = [line for line in printed.splitlines() if "1 | 2" in line]
    assert row.split()[:7] == ["2", "1", "|", "2", "2", "3", "1"]


def test_a_broken_promise_is_told_and_fails_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A violation ends with its trace in words and an exit status that is not 0."""
    monkeypatch.setattr(explore_command, "QUICK", [MUTANTS[5].setting])
    assert main(["explore", "--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    assert "A wins the swap for A.0: slot 0, payload granule 0." in printed
    assert "Promise 2 is broken: A.0 is handed over with bytes that are not its own." in printed


def test_a_mutant_that_survives_fails_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant that no trace exposes is named, and the exit status says so."""
    harmless = Mutant("nothing is wrong", SMALL[0])
    monkeypatch.setattr(explore_command, "MUTANTS", [MUTANTS[2], harmless])
    assert main(["explore", "--mutants", "--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    assert "SURVIVES" in printed
    assert "1 of 2 mutants found" in printed


def test_explorations_run_in_several_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come in the order of the settings, whichever process is first."""
    monkeypatch.setattr(explore_command, "QUICK", [SMALL[3], SMALL[0]])
    assert main(["explore", "--jobs", "2"]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("   ")]
    assert rows == ["2", "1"]


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status is 0 when all was found, and the table names it."""
    assert main(["explore", "--published"]) == 0
    printed = capsys.readouterr().out
    assert "steals the lock from A" in printed
    assert "Promise 2 is broken" in printed
