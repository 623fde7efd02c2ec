"""The forecast of a proxy: exact where nothing varies, never beyond its share, empty when all have ended."""

import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepiece.core.capacity import Step, WorkflowShape
from onepiece.core.forecast import REPORT_SECONDS, Forecast
from onepiece.core.live_times import MEMORY, LiveTimes, SeenTime
from onepiece.core.proxy_shares import shares

_SECONDS = st.floats(0.1, 20.0)
_WORKERS = st.integers(1, 8)


def _forecast(times: dict[str, float], workers: dict[str, int], share: float = 1.0) -> Forecast:
    live = LiveTimes()
    for stage, seconds in times.items():
        live.note(stage, "", seconds)
    forecast = Forecast(live)
    forecast.set_up({"video": WorkflowShape.line("video", times)}, workers)
    forecast.set_share(share)
    return forecast


def _in_a_row(arrivals: list[float], times: list[float], workers: list[int]) -> list[float]:
    """When requests leave a line of stages, each first come, first served."""
    moments = arrivals
    for seconds, count in zip(times, workers, strict=True):
        free = [0.0] * count
        ends = []
        for at in moments:
            begin = max(at, free[0])
            heapq.heapreplace(free, begin + seconds)
            ends.append(begin + seconds)
        moments = ends
    return moments


@given(
    st.lists(st.tuples(_SECONDS, _WORKERS), min_size=1, max_size=4),
    st.lists(st.floats(0.0, 5.0), min_size=1, max_size=30),
)
def test_it_is_exact_for_stages_in_a_row(stages: list[tuple[float, int]], gaps: list[float]) -> None:
    """Times that do not vary: each request is predicted to leave when it does."""
    names = [f"s{place}" for place in range(len(stages))]
    times = [seconds for seconds, _ in stages]
    workers = [count for _, count in stages]
    forecast = _forecast(dict(zip(names, times, strict=True)), dict(zip(names, workers, strict=True)))
    forecast.redraw(0.0)
    arrivals = [sum(gaps[: place + 1]) + 1.0 for place in range(len(gaps))]
    leaves = _in_a_row(arrivals, times, workers)
    for number, (at, leaves_at) in enumerate(zip(arrivals, leaves, strict=True)):
        prediction = forecast.predict("video", "", at)
        assert prediction is not None
        assert prediction.finish_at == pytest.approx(leaves_at)
        assert prediction.unloaded_seconds == pytest.approx(sum(times))
        forecast._is_stale = False  # nobody reports anything here
        forecast.take(str(number), "video", "", at)
        forecast.check_invariants()


@given(_SECONDS, _WORKERS, st.floats(0.05, 1.0), st.integers(20, 60))
def test_a_share_is_never_exceeded(seconds: float, workers: int, share: float, count: int) -> None:
    """Requests that come all at once leave no quicker than the share of the workers can serve them."""
    forecast = _forecast({"a": seconds}, {"a": workers}, share)
    forecast.redraw(0.0)
    for number in range(count):
        forecast.take(str(number), "video", "", 1.0)
    prediction = forecast.predict("video", "", 1.0)
    assert prediction is not None
    mine = math.ceil(workers * forecast.share - 1e-9)
    assert prediction.wait_seconds >= (count - mine) * seconds / (workers * forecast.share) - 1e-6
    forecast.check_invariants()


@given(st.lists(st.tuples(st.sampled_from("tsfd"), st.integers(0, 5), st.floats(0.0, 3.0)), max_size=60))
def test_whatever_is_reported_it_comes_back_to_nothing(steps: list[tuple[str, int, float]]) -> None:
    """Reports late, twice, or of nobody change no count; when all have ended nobody waits (fault 95)."""
    forecast = _forecast({"a": 1.0, "b": 4.0}, {"a": 1, "b": 2})
    now = 100.0
    for kind, number, seconds in steps:
        uid = str(number)
        now += seconds
        if kind == "t" and uid not in forecast._flights:
            forecast.take(uid, "video", "", now)
        elif kind == "s":
            forecast.started(uid, "0", now - seconds, now)
        elif kind == "f":
            forecast.finished(uid, "0", now, now)
        elif kind == "d":
            forecast.drop(uid)
        forecast.redraw(now)
        forecast.check_invariants()
    for number in range(6):
        forecast.drop(str(number))
    prediction = forecast.predict("video", "", now + 60.0)
    assert forecast.in_flight == 0
    assert prediction is not None
    assert prediction.wait_seconds == pytest.approx(0.0, abs=1e-9)


def test_it_follows_where_requests_really_are() -> None:
    """A stage that takes longer than usual holds its worker; one that has ended early lets it go."""
    forecast = _forecast({"a": 10.0}, {"a": 1})
    forecast.predict("video", "", 0.0)
    forecast.take("first", "video", "", 0.0)
    forecast.started("first", "0", 0.5, 0.5)
    prediction = forecast.predict("video", "", 1.0)
    assert prediction is not None
    assert prediction.finish_at == pytest.approx(20.5)
    forecast.finished("first", "0", 6.5, 6.5)
    prediction = forecast.predict("video", "", 7.0)
    assert prediction is not None
    assert prediction.wait_seconds == 0.0


def test_what_runs_late_may_take_as_long_again() -> None:
    """The longer a stage is over its time the later it is expected: it may hang, or have become slower."""
    forecast = _forecast({"a": 10.0}, {"a": 1})
    forecast.predict("video", "", 0.0)
    forecast.take("first", "video", "", 0.0)
    forecast.started("first", "0", 0.0, 0.0)
    for now, wait in ((9.0, 1.0), (10.0 + REPORT_SECONDS, 0.0), (15.0, 5.0), (50.0, 40.0)):
        forecast.redraw(now)
        prediction = forecast.predict("video", "", now)
        assert prediction is not None
        assert prediction.wait_seconds == pytest.approx(wait, abs=2 * REPORT_SECONDS + 1e-9)


def test_a_diamond_waits_for_its_longest_arm() -> None:
    """Two stages beside each other: the request takes as long as the longer one."""
    shape = WorkflowShape(
        "video", (Step("a", "a"), Step("b", "b", ("a",)), Step("c", "c", ("a",)), Step("d", "d", ("b", "c")))
    )
    live = LiveTimes()
    for stage, seconds in {"a": 1.0, "b": 2.0, "c": 7.0, "d": 1.0}.items():
        live.note(stage, "", seconds)
    forecast = Forecast(live)
    forecast.set_up({"video": shape}, dict.fromkeys("abcd", 1))
    prediction = forecast.predict("video", "", 0.0)
    assert prediction is not None
    assert prediction.unloaded_seconds == 9.0
    assert forecast.load_of("video", "") == 7.0


def test_nothing_measured_and_nothing_ready_is_no_forecast() -> None:
    """Nothing is made up: no time, no instance, no such workflow."""
    forecast = _forecast({"a": 1.0}, {"a": 1})
    assert forecast.predict("stills", "", 0.0) is None
    forecast.set_up({"video": WorkflowShape.line("video", ["a", "new"])}, {"a": 1, "new": 1})
    assert forecast.predict("video", "", 1.0) is None
    forecast.set_up({"video": WorkflowShape.line("video", ["a"])}, {"a": 0})
    assert forecast.predict("video", "", 2.0) is None
    assert forecast.load_of("video", "") is None


def test_times_follow_what_is_seen() -> None:
    """A stage that has become slower is known to be so after some requests; classes are told apart."""
    times = LiveTimes()
    for _ in range(100):
        times.note("a", "480p", 1.0)
    for _ in range(4 * MEMORY):
        times.note("a", "480p", 3.0)
        times.note("a", "720p", 9.0)
    found = times.time("a", "480p")
    assert found is not None
    assert found[0] == pytest.approx(3.0, abs=0.1)
    assert times.time("a", "720p") == (9.0, 0.0)
    pooled = times.time("a", "1080p")
    assert pooled is not None
    assert 3.0 < pooled[0] < 9.0
    times.note("a", "480p", math.nan)
    times.note("a", "480p", -1.0)
    assert times.time("a", "480p") == found


def test_other_proxies_times_count_while_they_live() -> None:
    """A proxy knows what others have seen, and forgets them when they are gone."""
    times = LiveTimes()
    times.hear("p2", [SeenTime("a", "", 4.0, 0.0, 32)])
    assert times.time("a", "") == (4.0, 0.0)
    times.note("a", "", 2.0)
    found = times.time("a", "")
    assert found is not None
    assert 3.5 < found[0] < 4.0
    times.forget_all_but([])
    assert times.time("a", "") == (2.0, 0.0)


@given(st.dictionaries(st.integers(0, 20).map(str), st.floats(0.0, 10.0) | st.just(math.inf), min_size=1))
def test_shares_are_the_whole(wanted: dict[str, float]) -> None:
    """They sum to one; who wants little gets it; equals get the same, and nobody less than an equal share."""
    found = shares(wanted)
    assert sum(found.values()) == pytest.approx(1.0)
    for proxy, wants in wanted.items():
        assert found[proxy] >= min(wants, 1 / len(wanted)) - 1e-9
        assert all(found[proxy] == pytest.approx(found[o]) for o, same in wanted.items() if same == wants)
    assert shares({}) == {}


def test_the_mean_alone_is_that_of_both() -> None:
    """Of a class, of the whole stage where the class was not seen, with what others say, and of nothing."""
    live = LiveTimes()
    assert live.mean_seconds("a", "s") is None
    live.note("a", "s", 1.0)
    live.note("a", "l", 4.0)
    for heard in ((), (SeenTime("a", "s", 9.0, 0.0, 3),)):
        live.hear("other", heard)
        for size_class in ("s", "l", "m"):
            seen = live.time("a", size_class)
            assert seen is not None
            assert live.mean_seconds("a", size_class) == pytest.approx(seen[0])


def test_a_worker_that_is_free_when_a_request_gets_there_lets_nobody_wait() -> None:
    """The way to a stage is learned: it is no waiting, and the worker need not idle for as long."""
    forecast = _forecast({"a": 1.0}, {"a": 1})
    for number in range(3):
        at, uid = 10.0 * number, str(number)
        forecast.take(uid, "video", "", at)
        forecast.queued(uid, "0", at + 0.2, at + 0.2)
        forecast.started(uid, "0", at + 0.2, at + 0.2)
        forecast.finished(uid, "0", at + 1.2, at + 1.2)
        forecast.drop(uid)
    forecast.take("runs", "video", "", 50.0)
    forecast.queued("runs", "0", 50.2, 50.2)
    forecast.started("runs", "0", 50.2, 50.2)
    for now, wait in ((50.5, 0.5), (51.0, 0.0), (60.0, 0.0)):
        prediction = forecast.predict("video", "", now)
        assert prediction is not None
        assert prediction.unloaded_seconds == pytest.approx(1.2)
        assert prediction.wait_seconds == pytest.approx(wait)


def test_a_way_is_bounded_and_only_of_what_was_seen() -> None:
    """Neither a client that takes a minute for its body, nor a clock ahead of ours, moves it far."""
    for queued_at, way in ((70.0, 1.0), (-5.0, 0.0)):
        forecast = _forecast({"a": 1.0}, {"a": 1})
        forecast.take("one", "video", "", 10.0)
        forecast.queued("one", "0", queued_at, 80.0)
        forecast.started("one", "0", 80.0, 80.0)
        forecast.finished("one", "0", 81.0, 81.0)
        prediction = forecast.predict("video", "", 100.0)
        assert prediction is not None
        assert prediction.unloaded_seconds == pytest.approx(1.0 + way)


def test_a_worker_that_was_busy_a_moment_ago_has_not_begun_before_that() -> None:
    """What waits, and may run without our knowing, begins no earlier than the one before ended."""
    forecast = _forecast({"a": 1.0}, {"a": 1})
    for uid in ("one", "two"):
        forecast.take(uid, "video", "", 10.0)
        forecast.queued(uid, "0", 10.0, 10.1)
    forecast.started("one", "0", 10.0, 10.1)
    forecast.finished("one", "0", 11.0, 11.1)
    forecast.drop("one")
    prediction = forecast.predict("video", "", 11.1)
    assert prediction is not None
    assert prediction.finish_at == pytest.approx(13.0)
