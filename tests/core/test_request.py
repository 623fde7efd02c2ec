"""The table of a proxy's requests: one final state each, whatever order things are reported in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepiece.core.request import RequestTable
from onepiece.core.request_events import (
    Accepted,
    Adopted,
    CancelAsked,
    Effect,
    EndFound,
    EndStands,
    Event,
    Headed,
    KeepError,
    NodesDied,
    Publish,
    ReleaseRetained,
    RequestBroke,
    ResultArrived,
    Settled,
    StageReported,
    StopStages,
    Tick,
)
from onepiece.core.request_record import (
    FINISHED,
    INPUTS,
    PENDING,
    QUEUED,
    RUNNING,
    Holding,
    Plan,
    Resend,
    RestoreCheckpoint,
    SendInputs,
)
from onepiece.errors import OnePieceError, RequestCancelled, StageFailed, UnknownRequest
from onepiece.requests import EventKind, RequestState

UID = "request-1"
PLAN = Plan({"encode": (INPUTS,), "decode": ("encode",)}, "decode")


def table(records_max: int = 100) -> RequestTable:
    """An empty table with small bounds."""
    return RequestTable(
        records_max=records_max,
        records_bytes_max=200_000,
        events_max=20,
        events_bytes_max=50_000,
        keep_seconds=100.0,
    )


def accepted(uid: str = UID, deadline_at: float = 60.0, key: str | None = None) -> Accepted:
    """A request of two stages was accepted."""
    return Accepted(uid, "clip", PLAN, deadline_at, key)


def reported(kind: EventKind, stage: str = "encode", node: str = "n1", **heading: str) -> StageReported:
    """A stage of it said something."""
    return StageReported(UID, kind, stage, node, node, 1.0, {}, heading)


def handle_and_keep(requests: RequestTable, event: Event, now: float) -> list[Effect]:
    """Handle an event, and say of each error that is to be stored that it stands."""
    effects = requests.handle(event, now)
    for wanted in [effect for effect in effects if isinstance(effect, KeepError)]:
        effects += requests.handle(EndStands(wanted.uid, wanted.error), now)
    return effects


def test_request_runs_to_its_result() -> None:
    """A request that all stages report ends FINISHED, with every event in order and its place free."""
    requests = table()
    requests.handle(accepted(), 0.0)
    assert requests.status(UID).state is RequestState.ACCEPTED
    requests.handle(Headed(UID, {"encode": "n1"}), 0.1)
    for stage in ("encode", "decode"):
        for kind in (EventKind.QUEUED, EventKind.STAGE_STARTED, EventKind.STAGE_FINISHED):
            requests.handle(reported(kind, stage), 0.5)
    assert requests.status(UID).state is RequestState.RUNNING
    effects = requests.handle(ResultArrived(UID, 10, "video/mp4"), 2.0)
    assert Settled(UID, "clip", RequestState.FINISHED) in effects
    status = requests.status(UID)
    assert (status.state, status.result_bytes, status.finished_at) == (RequestState.FINISHED, 10, 2.0)
    assert set(status.stages.values()) == {FINISHED}
    kinds = [event.kind for event in requests.events(UID, -1)]
    assert (kinds[0], kinds[-1]) == (EventKind.ACCEPTED, EventKind.FINISHED)
    requests.check_invariants()


def test_what_comes_with_the_result_is_told_and_asks_for_nothing() -> None:
    """Reports that come with the result only say how it came about: nothing is sent because of them."""
    requests = table()
    requests.handle(accepted(), 0.0)
    reports = tuple(
        reported(kind, stage)
        for stage in ("encode", "decode")
        for kind in (EventKind.QUEUED, EventKind.STAGE_STARTED, EventKind.STAGE_FINISHED)
    )
    effects = requests.handle(ResultArrived(UID, 10, "video/mp4", reports), 2.0)
    assert not any(isinstance(effect, SendInputs | Resend | RestoreCheckpoint) for effect in effects)
    told = [event.kind for event in requests.events(UID, -1)]
    assert told == [EventKind.ACCEPTED, *(report.kind for report in reports), EventKind.FINISHED]


ENDS: list[tuple[Event, float, str]] = [
    (RequestBroke(UID, "encode", "n1", StageFailed("it broke").to_wire()), 1.0, "failed"),
    (CancelAsked(UID), 1.0, "cancelled"),
    (Tick(), 60.0, "failed"),
]


@pytest.mark.parametrize(("event", "now", "state"), ENDS, ids=["failure", "cancellation", "deadline"])
def test_error_is_told_when_it_is_stored(event: Event, now: float, state: str) -> None:
    """Until then the request has not ended, for anybody: no event, no place given back, work stopped."""
    requests = table()
    requests.handle(accepted(), 0.0)
    effects = requests.handle(event, now)
    assert [type(effect) for effect in effects] == [KeepError, StopStages]
    [wanted] = [effect for effect in effects if isinstance(effect, KeepError)]
    assert requests.is_live(UID)
    assert requests.status(UID).error is None
    for late in (event, CancelAsked(UID), Tick()):
        assert requests.handle(late, now + 99.0) == []
    effects = requests.handle(EndStands(UID, wanted.error), now + 100.0)
    assert [type(effect) for effect in effects] == [Publish, Settled]
    status = requests.status(UID)
    assert (status.state.value, status.error, status.finished_at) == (state, wanted.error, now + 100.0)
    assert [each.kind.value for each in requests.events(UID, -1)] == ["accepted", state]
    requests.check_invariants()


def test_what_stands_is_the_end() -> None:
    """Where another owner was quicker to store a result, or another error, that is how the request ended."""
    broke, cancelled = StageFailed("it broke").to_wire(), RequestCancelled("by another owner").to_wire()
    for first, stands, state in (
        (CancelAsked(UID), EndStands(UID, None, 10, "video/mp4"), RequestState.FINISHED),
        (CancelAsked(UID), EndStands(UID, broke), RequestState.FAILED),
        (Tick(), EndStands(UID, cancelled), RequestState.CANCELLED),
    ):
        requests = table()
        requests.handle(accepted(), 0.0)
        requests.handle(first, 60.0)
        effects = requests.handle(stands, 61.0)
        assert Settled(UID, "clip", state) in effects
        status = requests.status(UID)
        assert (status.state, status.error) == (state, stands.error)
        if stands.error is None:
            assert (status.result_bytes, status.content_type) == (10, "video/mp4")
            assert set(status.stages.values()) == {FINISHED}
        requests.check_invariants()


def test_a_result_that_arrives_while_a_request_ends_is_told_when_it_stands() -> None:
    """One store node has the result, another one may have an error that came first: they say which stands."""
    for stands, state in (
        (EndStands(UID, None, 7, "x"), RequestState.FINISHED),
        (EndStands(UID, RequestCancelled("x").to_wire()), RequestState.CANCELLED),
    ):
        requests = table()
        requests.handle(accepted(), 0.0)
        requests.handle(CancelAsked(UID), 1.0)
        assert requests.handle(ResultArrived(UID, 7, "x"), 1.1) == []
        assert requests.is_live(UID)
        requests.handle(stands, 1.2)
        assert requests.status(UID).state is state
        requests.check_invariants()


def test_end_that_another_owner_stored_is_this_ones_end() -> None:
    """An owner that learns from the stores how its request ended ends it so, and lets go of what is held."""
    for error in (None, StageFailed("it broke").to_wire()):
        requests = table()
        requests.handle(accepted(), 0.0)
        requests.handle(reported(EventKind.STAGE_STARTED), 0.5)
        effects = requests.handle(EndFound(UID, EndStands(UID, error, 10, "video/mp4")), 1.0)
        assert ReleaseRetained(UID, frozenset({"n1"})) in effects
        assert not any(isinstance(effect, KeepError) for effect in effects)
        status = requests.status(UID)
        assert (status.state.is_final, status.error) == (True, error)
        requests.check_invariants()


def test_a_request_that_ends_goes_nowhere() -> None:
    """While its error is being stored nothing is sent for it, whatever dies; latecomers are to let go."""
    requests = table()
    requests.handle(accepted(), 0.0)
    requests.handle(reported(EventKind.STAGE_STARTED), 1.0)
    requests.handle(CancelAsked(UID), 2.0)
    assert requests.handle(NodesDied(frozenset({"n1"})), 2.1) == []
    done = reported(EventKind.STAGE_FINISHED, node="n2", decode="n3")
    for _ in range(2):
        assert requests.handle(Headed(UID, {"decode": "n4"}), 2.1) == [
            ReleaseRetained(UID, frozenset({"n4"}))
        ]
        assert requests.handle(done, 2.1) == [ReleaseRetained(UID, frozenset({"n2", "n3"}))]
        requests.handle(EndStands(UID, RequestCancelled("x").to_wire()), 2.2)  # and afterwards, too
    requests.check_invariants()


def test_a_second_run_hears_of_the_end_though_all_of_it_came_late() -> None:
    """A stage ran twice, and the owner hears of it when the first run's result has come long since.

    What the second run retains, and what waits where its output went, nobody else would let go of.
    """
    requests = table()
    requests.handle(accepted(), 0.0)
    first = (
        reported(EventKind.STAGE_FINISHED, "encode", "n1"),
        reported(EventKind.STAGE_FINISHED, "decode", "n2"),
    )
    requests.handle(ResultArrived(UID, 10, "video/mp4", first), 1.0)
    assert requests.is_settled(UID, "encode", "n1"), "of the run that counts nothing is to be told any more"
    assert not requests.is_settled(UID, "encode", "n2"), "a second run on a node that has run another stage"
    second = reported(EventKind.STAGE_FINISHED, "encode", "n2", decode="n3")
    assert requests.handle(second, 2.0) == [ReleaseRetained(UID, frozenset({"n2", "n3"}))]
    assert requests.handle(Headed(UID, {"decode": "n4"}), 2.0) == [ReleaseRetained(UID, frozenset({"n4"}))]
    assert not requests.is_settled("another", "encode", "n1")
    assert not requests.is_settled(UID, "another", "n1")


def test_a_word_that_comes_unasked_ends_nothing() -> None:
    """What a store node says of a request that is not ending is an answer to an earlier life: no end."""
    requests = table()
    requests.handle(accepted(), 0.0)
    assert requests.handle(EndStands(UID, RequestCancelled("x").to_wire()), 1.0) == []
    assert requests.is_live(UID)


def test_owner_after_owner_is_given_up() -> None:
    """A request that has cost five nodes that owned it is not tried again: it may be what killed them."""
    for adoptions, is_given_up in ((4, False), (5, True)):
        requests = table()
        effects = requests.handle(Adopted(accepted(), 0.0, adoptions, ()), 7.0)
        errors = [effect.error["error"] for effect in effects if isinstance(effect, KeepError)]
        assert errors == (["NodeLost"] if is_given_up else [])
        assert any(isinstance(effect, SendInputs) for effect in effects) != is_given_up


def test_first_end_wins() -> None:
    """What arrives after a request has ended changes nothing and tells nobody."""
    requests = table()
    requests.handle(accepted(), 0.0)
    handle_and_keep(requests, CancelAsked(UID), 1.0)
    stands = EndStands(UID, None, 1, "x")
    for late in (ResultArrived(UID, 1, "x"), CancelAsked(UID), NodesDied(frozenset({"n1"})), stands, Tick()):
        assert requests.handle(late, 99.0) == []
    assert requests.status(UID).state is RequestState.CANCELLED


def test_what_is_told_twice_is_one_event() -> None:
    """The same node's reports say all again and again; followers hear of each state once."""
    requests = table()
    requests.handle(accepted(), 0.0)
    states = (EventKind.QUEUED, EventKind.STAGE_STARTED, EventKind.STAGE_FINISHED)
    for upto in (1, 2, 3, 3):
        for kind in states[:upto]:
            requests.handle(reported(kind), 1.0)
    kinds = [event.kind for event in requests.events(UID, -1)]
    assert kinds == [EventKind.ACCEPTED, *states]


def test_what_another_node_tells_is_an_event_of_its_own() -> None:
    """A stage that starts again elsewhere is seen to, and its request is lost with that node."""
    requests = table()
    requests.handle(accepted(), 0.0)
    requests.handle(reported(EventKind.STAGE_STARTED, node="n1"), 1.0)
    assert requests.handle(reported(EventKind.STAGE_STARTED, node="n2"), 1.0) != []
    assert requests.handle(NodesDied(frozenset({"n1"})), 2.0) == []
    assert requests.handle(NodesDied(frozenset({"n2"})), 2.0) != []


def test_late_report_does_not_turn_a_stage_back() -> None:
    """Reports that overtake each other never make a finished stage look unfinished."""
    requests = table()
    requests.handle(accepted(), 0.0)
    requests.handle(reported(EventKind.STAGE_FINISHED), 1.0)
    requests.handle(reported(EventKind.STAGE_STARTED), 1.1)
    assert requests.status(UID).stages["encode"] == FINISHED


@pytest.mark.parametrize(
    ("events", "sent_again"),
    [
        pytest.param([Headed(UID, {"encode": "n1"})], [SendInputs(UID, "encode", 2)], id="on its way"),
        pytest.param([reported(EventKind.QUEUED)], [SendInputs(UID, "encode", 2)], id="queued"),
        pytest.param([reported(EventKind.STAGE_STARTED)], [SendInputs(UID, "encode", 2)], id="running"),
        pytest.param(
            [reported(EventKind.STAGE_FINISHED, node="n2", decode="n1")],
            [Resend(UID, "encode", "decode", "n2", 2)],
            id="output on its way there",
        ),
        pytest.param([reported(EventKind.QUEUED, node="n2")], [], id="on another node"),
    ],
)
def test_node_death_sends_again_just_what_it_held(events: list[Event], sent_again: list[object]) -> None:
    """A dead node costs the requests that had unfinished work at it, and what they need is sent again."""
    requests = table()
    requests.handle(accepted(), 0.0)
    for event in events:
        requests.handle(event, 0.5)
    assert requests.handle(NodesDied(frozenset({"n1"})), 1.0) == sent_again
    assert not requests.status(UID).state.is_final
    requests.check_invariants()


def test_poison_ends_in_stage_failed() -> None:
    """A request whose stage kills two nodes fails with the stage's name, and is not tried a third time."""
    requests = table()
    requests.handle(accepted(), 0.0)
    for life in ("n1", "n2"):
        requests.handle(reported(EventKind.STAGE_STARTED, node=life), 0.5)
        handle_and_keep(requests, NodesDied(frozenset({life})), 1.0)
    error = requests.status(UID).error
    assert error is not None
    assert error["error"] == "StageFailed"
    assert "encode" in error["message"]


def test_dead_node_is_not_listened_to() -> None:
    """What a node says under a life that is over, late or after it has come back, changes nothing."""
    requests = table()
    requests.handle(accepted(), 0.0)
    requests.handle(NodesDied(frozenset({"n1"})), 0.5)
    assert requests.handle(reported(EventKind.STAGE_FINISHED), 1.0) == []
    assert requests.status(UID).stages["encode"] == PENDING


def test_adopted_request_goes_on_where_it_is() -> None:
    """A new owner runs nothing again that a node holds, and its events come behind the earlier owner's."""
    requests = table()
    held = (Holding("n1", {}, ("encode",)), Holding("n2", {"decode": RUNNING}, ()))
    effects = requests.handle(Adopted(accepted(), 0.0, 1, held), 7.0)
    assert not any(isinstance(effect, SendInputs | Resend) for effect in effects)
    assert requests.status(UID).stages == {"encode": FINISHED, "decode": RUNNING}
    assert requests.events(UID, -1)[0].sequence >= 7000
    requests.check_invariants()


def test_finished_request_releases_what_is_retained() -> None:
    """Once the result is stored, the nodes that hold something of the request are told to let go."""
    requests = table()
    requests.handle(accepted(), 0.0)
    requests.handle(reported(EventKind.STAGE_FINISHED, decode="n2"), 0.5)
    effects = requests.handle(ResultArrived(UID, 1, "x"), 1.0)
    assert ReleaseRetained(UID, frozenset({"n1", "n2"})) in effects


def test_deadline_names_the_open_stage() -> None:
    """A missed deadline ends the request in a DeadlineExceeded that says where it was."""
    requests = table()
    requests.handle(accepted(deadline_at=5.0), 0.0)
    requests.handle(reported(EventKind.STAGE_STARTED), 1.0)
    assert requests.next_deadline() == 5.0
    assert requests.handle(Tick(), 4.9) == []
    handle_and_keep(requests, Tick(), 5.0)
    error = requests.status(UID).error
    assert error is not None
    assert error["error"] == "DeadlineExceeded"
    assert "encode" in error["message"]


def test_key_finds_the_request_while_it_is_known() -> None:
    """An idempotency key leads to its request, and is forgotten together with it."""
    requests = table(records_max=1)
    requests.handle(accepted("a", key="order-17"), 0.0)
    assert requests.uid_of_key("order-17") == "a"
    handle_and_keep(requests, CancelAsked("a"), 1.0)
    requests.handle(accepted("b"), 2.0)
    handle_and_keep(requests, CancelAsked("b"), 3.0)
    assert requests.uid_of_key("order-17") is None
    with pytest.raises(UnknownRequest):
        requests.status("a")
    requests.check_invariants()


def test_a_key_of_two_requests_is_forgotten_with_the_first() -> None:
    """Two requests of one key, as store nodes that cannot reach each other let happen, are both disowned."""
    requests = table()
    requests.handle(accepted("a", key="order-17"), 0.0)
    requests.handle(accepted("b", key="order-17"), 0.0)
    assert requests.uid_of_key("order-17") == "a"
    requests.disown()
    assert requests.uid_of_key("order-17") is None
    requests.check_invariants()


def test_progress_is_what_is_dropped_when_events_are_many() -> None:
    """A request that reports progress for ever keeps a bounded list with every other event in it."""
    requests = table()
    requests.handle(accepted(), 0.0)
    requests.handle(reported(EventKind.STAGE_STARTED), 0.1)
    for _ in range(500):
        requests.handle(reported(EventKind.PROGRESS), 0.2)
    kinds = [event.kind for event in requests.events(UID, -1)]
    assert len(kinds) <= 21
    assert kinds[:2] == [EventKind.ACCEPTED, EventKind.STAGE_STARTED]


def test_newest_requests_come_first() -> None:
    """The list shows the newest first, filtered by state, as many as asked for."""
    requests = table()
    for number in range(5):
        requests.handle(accepted(f"r{number}"), float(number))
    handle_and_keep(requests, CancelAsked("r3"), 9.0)
    assert [status.uid for status in requests.statuses(limit=3, state=None)] == ["r4", "r3", "r2"]
    assert [status.uid for status in requests.statuses(limit=9, state="cancelled")] == ["r3"]


UIDS = st.sampled_from(["a", "b", "c"])
NODES = st.sampled_from(["n1", "n2"])
STAGES = st.sampled_from(["encode", "decode", "unknown"])
EVENTS = st.one_of(
    st.builds(
        StageReported,
        UIDS,
        st.sampled_from(EventKind),
        STAGES,
        NODES,
        NODES,
        st.just(0.0),
        st.just({}),
        st.just({}),
    ),
    st.builds(ResultArrived, UIDS, st.just(1), st.just("x")),
    st.builds(RequestBroke, UIDS, STAGES, NODES, st.just(OnePieceError("x").to_wire())),
    st.builds(CancelAsked, UIDS),
    st.builds(
        EndStands,
        UIDS,
        st.sampled_from([None, OnePieceError("x").to_wire(), RequestCancelled("x").to_wire()]),
    ),
    st.builds(NodesDied, st.frozensets(NODES)),
    st.builds(Tick),
)


@given(st.lists(EVENTS, max_size=60))
def test_any_order_of_events_ends_each_request_once(events: list[Event]) -> None:
    """Whatever comes in whatever order: one final event each; states go back if a node died (fault 107)."""
    requests = table()
    for uid in ("a", "b", "c"):
        requests.handle(Accepted(uid, "clip", PLAN, 50.0), 0.0)
    order = {PENDING: 0, QUEUED: 1, RUNNING: 2, FINISHED: 3}
    finals: dict[str, int] = {}
    settled: dict[str, int] = {}

    def note(effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Settled):
                settled[effect.uid] = settled.get(effect.uid, 0) + 1
            if isinstance(effect, Publish) and effect.event.kind.value in {"finished", "failed", "cancelled"}:
                finals[effect.event.uid] = finals.get(effect.event.uid, 0) + 1

    for now, event in enumerate(events):
        before = {uid: requests.status(uid).stages for uid in "abc"}
        note(requests.handle(event, float(now)))
        requests.check_invariants()
        if isinstance(event, NodesDied):
            continue  # what is lost goes back
        for uid in "abc":
            after = requests.status(uid).stages
            assert all(order[after[stage]] >= order[before[uid][stage]] for stage in after)
    note(requests.handle(Tick(), 1000.0))
    for uid in requests.live_uids():
        note(requests.handle(EndStands(uid, OnePieceError("x").to_wire()), 1000.0))
    assert requests.live_count() == 0
    assert finals == dict.fromkeys("abc", 1)
    assert settled == finals
