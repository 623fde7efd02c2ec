"""The events of one request: all that matter are kept, and what they take is bounded."""

from hypothesis import given
from hypothesis import strategies as st

from onepiece.core.event_log import LOSSY, EventLog, size_of
from onepiece.core.request import RequestTable
from onepiece.core.request_events import Accepted, CancelAsked, EndStands, StageReported
from onepiece.core.request_record import INPUTS, Plan
from onepiece.requests import EventKind

PLAN = Plan({"draw": (INPUTS,)}, "draw")
KINDS = [EventKind.QUEUED, EventKind.STAGE_STARTED, EventKind.PROGRESS, EventKind.PREVIEW]


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 300)), max_size=60))
def test_no_event_that_matters_is_dropped(told: list[tuple[EventKind, int]]) -> None:
    """Whatever comes, in order, gaps are progress alone; the newest is there; sums are right (fault 109)."""
    log = EventLog("r", count_max=12, bytes_max=4000)
    lossy_bytes = 0
    for kind, length in told:
        newest = log.add(kind, 1.0, detail={"preview": b"x" * length})
        kept = log.after(-1)
        assert kept[-1] == newest
        lossy_bytes = sum(length_of(each.detail) for each in kept if each.kind in LOSSY)
        assert lossy_bytes <= 4000
    sequences = [event.sequence for event in log.after(-1)]
    assert sequences == sorted(set(sequences))
    matter = [number for number, (kind, _) in enumerate(told) if kind not in LOSSY]
    assert set(matter) <= set(sequences)
    assert (log.held_bytes > 0) == bool(told)


def length_of(detail: object) -> int:
    """What the log counts for a detail."""
    return size_of(detail)


def test_previews_do_not_fill_the_memory() -> None:
    """A request that sends ever more previews holds no more of them than the bound."""
    log = EventLog("r", count_max=1000, bytes_max=1_000_000)
    for _ in range(100):
        log.add(EventKind.PREVIEW, 1.0, detail={"preview": b"x" * 100_000})
        assert log.held_bytes <= 1_000_000
    assert sum(len(event.detail["preview"]) for event in log.after(-1)) <= 1_000_000


def test_ended_records_are_bounded_by_their_bytes() -> None:
    """Of ended requests with large events the oldest are forgotten, with their keys, before the count is."""
    table = RequestTable(
        records_max=1000,
        records_bytes_max=500_000,
        events_max=100,
        events_bytes_max=100_000,
        keep_seconds=1e9,
    )
    for number in range(40):
        uid = f"r{number}"
        table.handle(Accepted(uid, "film", PLAN, 100.0, key=f"key-{number}"), 0.0)
        preview = {"preview": b"x" * 50_000}
        table.handle(StageReported(uid, EventKind.PREVIEW, "draw", "n1", "n1", 1.0, preview), 1.0)
        table.handle(CancelAsked(uid), 2.0)
        table.handle(EndStands(uid, {"error": "RequestCancelled"}), 2.0)
        table.check_invariants()
    assert table.is_known("r39")
    assert not table.is_known("r0")
    assert table.uid_of_key("key-0") is None
    assert len(table.statuses(limit=100, state=None)) <= 10
