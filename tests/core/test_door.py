"""Admission: nothing unknown refuses, what cannot be in time does, places are fair and come back."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepiece.core.admission import (
    Admission,
    AdmissionRules,
    BudgetLimits,
    Demand,
    ProxyLoad,
    RequestBudget,
)
from onepiece.core.capacity import WorkflowShape
from onepiece.core.fair_door import LEAD_REQUESTS, WANT_SECONDS, FairDoor, Weights
from onepiece.core.live_times import SeenTime
from onepiece.errors import Overloaded
from onepiece.limits import FLOWS_MAX
from onepiece.requests import Terms
from simulations.admission import Setting, SimStage, Source, run

_PLAIN = Terms()


def _door(
    rules: AdmissionRules | None = None, total: int = 1000, seconds: float | None = 10.0, workers: int = 1
) -> Admission:
    budget = RequestBudget(BudgetLimits(total=total, each=total))
    door = Admission(budget, rules or AdmissionRules(), life="me")
    door.set_up([WorkflowShape.line("video", ["a"])], {"a": workers})
    if seconds is not None:
        _run_one(door, "seen", -2 * seconds, seconds)
    return door


def _run_one(door: Admission, uid: str, at: float, seconds: float) -> None:
    door.offer(uid, "video", _PLAIN, 3600.0, at)
    door.started(uid, "0", at, at)
    door.finished(uid, "0", at + seconds, at + seconds)
    door.give_back(uid)


def _reason(door: Admission, uid: str, timeout: float, now: float, terms: Terms = _PLAIN) -> str | None:
    try:
        door.offer(uid, "video", terms, timeout, now)
    except Overloaded as error:
        return str(error.fields["reason"])
    return None


def test_nothing_known_refuses_nothing() -> None:
    """Before a stage has reported anything there is only the number of places, whatever time was given."""
    door = _door(total=5, seconds=None)
    assert [_reason(door, str(number), 0.001, 0.0) for number in range(6)] == [None] * 5 + ["in_flight"]


def test_a_flood_before_anything_is_known_is_bounded_where_waiting_is() -> None:
    """Who bounds waiting gets no more requests in, before one has ended, than there are workers."""
    door = _door(AdmissionRules(wait_factor=0.2), seconds=None, workers=3)
    assert [_reason(door, str(number), 60.0, 0.0) for number in range(5)] == [None] * 3 + ["wait"] * 2


def test_who_would_miss_its_deadline_is_refused_and_told_when_to_come() -> None:
    """One worker, ten seconds each: the third of three may come in if it has the time."""
    door = _door()
    assert _reason(door, "1", 15.0, 0.0) is None
    assert _reason(door, "2", 25.0, 0.0) is None
    with pytest.raises(Overloaded, match=r"wait for 20\.00 s, and was given 25\.00 s") as caught:
        door.offer("3", "video", _PLAIN, 25.0, 0.0)
    assert caught.value.fields["retry_after_seconds"] == pytest.approx(5.0)
    assert _reason(door, "3", 31.0, 0.0) is None
    assert door.counts == {"admitted": 4, "in_flight": 0, "late": 1, "wait": 0, "unfair": 0}


def test_one_alone_is_let_in_though_it_seems_hopeless() -> None:
    """Were none let in, nobody would ever learn that a stage has become quicker."""
    door = _door(seconds=100.0)
    assert _reason(door, "1", 5.0, 0.0) is None
    assert _reason(door, "2", 5.0, 0.0) == "late"
    door.give_back("1")
    for number in range(60):
        _run_one(door, f"quick-{number}", 10.0 + 3 * number, 1.0)
    assert _reason(door, "3", 50.0, 300.0) is None
    assert _reason(door, "4", 50.0, 300.0) is None


def test_a_full_set_is_refused_where_waiting_is_bounded() -> None:
    """With a wait factor a request that would wait too long is refused, with the other sets to try."""
    door = _door(AdmissionRules(wait_factor=0.5, elsewhere=("http://other:7080",)), workers=2)
    assert [_reason(door, str(number), 3600.0, 0.0) for number in range(2)] == [None, None]
    with pytest.raises(Overloaded, match="http://other:7080") as caught:
        door.offer("3", "video", _PLAIN, 3600.0, 0.0)
    assert caught.value.fields["elsewhere"] == ["http://other:7080"]
    assert caught.value.fields["retry_after_seconds"] == pytest.approx(5.0)
    assert caught.value.retryable
    assert _reason(door, "3", 3600.0, 5.5) is None


def test_places_come_back_however_requests_end() -> None:
    """Thousands that are cancelled or never come about: nothing of them is left (faults 95 and 97)."""
    door = _door(AdmissionRules(wait_factor=1.0), total=50)
    rng = Random(3)
    for number in range(5000):
        now, uid = number * 0.5, f"u{number}"
        if _reason(door, uid, 100.0, now, Terms(tenant=f"t{number}")) is None and rng.random() < 0.5:
            door.started(uid, "0", now, now)
        if rng.random() < 0.9:
            door.give_back(f"u{rng.randrange(max(0, number - 20), number + 1)}")
    for number in range(5000):
        door.give_back(f"u{number}")
    door.check_invariants()
    assert door.budget.in_flight == 0
    view = door.view(10_000.0)
    assert view["workflows"]["video"]["wait_seconds"] == 0.0
    assert len(door._door._root.children["video"].children) <= FLOWS_MAX + 1


def test_what_is_adopted_counts() -> None:
    """A request of a proxy that died comes in without asking, and holds its worker in the forecast."""
    door = _door(AdmissionRules(wait_factor=0.0))
    door.adopted("theirs", "video", _PLAIN, 0.0)
    door.adopted("theirs", "video", _PLAIN, 0.0)
    assert _reason(door, "1", 3600.0, 0.0) == "wait"
    door.give_back("theirs")
    assert _reason(door, "1", 3600.0, 1.0) is None


def test_a_dead_proxys_share_goes_to_the_others() -> None:
    """Two proxies share equally until one has said that it needs little; a dead one needs nothing."""
    door = _door(workers=8)
    door.set_proxies(["me", "p2"], 0.0)
    assert 0 < door.share <= 0.01  # nobody asks this one yet, and p2 may want all
    for number in range(200):
        _reason(door, str(number), 1e9, number * 0.01)
    door.set_proxies(["me", "p2"], 2.0)
    assert door.share == pytest.approx(0.5)
    door.hear(ProxyLoad("p2", 0.1, (SeenTime("a", "", 5.0, 0.0, 3),)), 2.0)
    assert door.share == pytest.approx(0.9)
    door.hear(ProxyLoad("stranger", 9.0, ()), 2.0)
    door.hear(ProxyLoad("p2", math.nan, ()), 2.0)
    assert door.share == pytest.approx(0.9)
    door.set_proxies(["me"], 2.5)
    assert door.share == 1.0


def test_what_others_have_seen_is_known_at_once() -> None:
    """A proxy that looked before, and knew nothing, forecasts with the times that it hears."""
    door = _door(seconds=None)
    door.set_proxies(["me", "p2"], 0.0)
    assert door.view(0.0)["workflows"]["video"]["unloaded_seconds"] is None
    door.hear(ProxyLoad("p2", 0.0, (SeenTime("a", "", 5.0, 0.0, 3),)), 1.0)
    door.hear(ProxyLoad("p2", 0.0, (SeenTime("a", "", 4.0, 0.0, 3),)), 2.0)
    assert door.view(2.0)["workflows"]["video"]["unloaded_seconds"] == 4.0


def test_demand_is_forgotten() -> None:
    """What was asked for long ago is no demand."""
    demand = Demand()
    for number in range(100):
        demand.note(0.5, number * 0.25)
    assert demand.at(25.0) == pytest.approx(2.0, rel=0.1)
    assert demand.at(100.0) < 1e-5


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.01, 0.5)), min_size=10, max_size=60),
    st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 3.0]) for name in "abc"}),
)
def test_nobody_runs_away_from_those_that_want(
    asks: list[tuple[str, float]], weights: dict[str, float]
) -> None:
    """Whoever asks however often: who has the least work is never ahead, no other by more than its lead."""
    door = FairDoor()
    now = 0.0
    for number, (name, gap) in enumerate(asks):
        now += gap / 10
        weight = (weights[name],)
        if number < 3:
            door.refused("abc"[number], (1.0,), 1.0, now)
        elif door.is_ahead(name, weight, 1.0, now):
            door.refused(name, weight, 1.0, now)
        else:
            door.accepted(name, weight, 1.0, now)
        work = {each: door.work(each) for each in "abc"}
        if now < WANT_SECONDS:
            least = min(work, key=lambda each: (work[each], each))
            assert not door.is_ahead(least, (weights[least],), 1.0, now)
            for each, done in work.items():
                assert done <= work[least] + (LEAD_REQUESTS + 1) / weights[each] + 1e-9


def test_having_been_away_saves_nothing_up() -> None:
    """Who comes back after an hour does not get an hour's worth of places."""
    door = FairDoor()
    for number in range(1000):
        door.accepted("a", (1.0,), 1.0, float(number))
    door.refused("b", (1.0,), 1.0, 1000.0)
    assert door.work("b") >= door.work("a") - LEAD_REQUESTS
    for number in range(1000):
        door.accepted("a", (1.0,), 1.0, 1000.0 + number)
    door.refused("b", (1.0,), 1.0, 2000.0)
    assert door.work("b") >= door.work("a") - LEAD_REQUESTS - 1


def test_a_flood_of_names_is_bounded() -> None:
    """Names that are made up take no memory without end, and who was there before is still told apart."""
    door = FairDoor()
    door.refused(("video", "old"), (1.0, 1.0), 1.0, 0.0)
    for number in range(5 * FLOWS_MAX):
        door.refused(("video", f"t{number}"), (1.0, 1.0), 1.0, number / 1000)
    flows = door._root.children["video"]
    assert len(flows.children) <= FLOWS_MAX + 1
    assert len(flows.wanting) <= 4 * FLOWS_MAX + 1
    assert "old" in flows.children


_STAGES = (SimStage(1.0, 4, 0.1), SimStage(5.0, 20, 0.1), SimStage(1.0, 4, 0.1))


@pytest.mark.parametrize("load", [0.5, 2.0, 5.0])
def test_accepted_requests_are_quick_and_the_stages_busy(load: float) -> None:
    """Below, at twice and five times what the set can do: nobody waits long, nothing is wasted (fault 82)."""
    setting = Setting(_STAGES, seconds=120.0, warm_seconds=40.0)
    unloaded = run(setting, [Source(0.05)])
    loaded = run(setting, [Source(load)])
    assert loaded.quantile(0.95) <= 1.3 * unloaded.quantile(0.95)
    assert loaded.rate >= 0.95 * min(setting.rate, loaded.offered / setting.seconds)


@pytest.mark.parametrize("report_seconds", [0.0, 0.1])
def test_short_stages_are_kept_busy_though_the_way_to_them_is_long(report_seconds: float) -> None:
    """One worker of 0.2 s, 0.06 s from the door to it and 0.02 s back: it does not idle for that long."""
    setting = Setting(
        (SimStage(0.2, 1, 0.02),),
        seconds=60.0,
        warm_seconds=10.0,
        report_seconds=report_seconds,
        entry_seconds=0.06,
        exit_seconds=0.02,
    )
    unloaded = run(setting, [Source(0.05)])
    loaded = run(setting, [Source(14.0)])
    assert loaded.rate >= 0.97 * setting.rate
    assert loaded.quantile(0.95) <= 1.2 * unloaded.quantile(0.95)


def test_a_tenant_that_insists_gets_no_more() -> None:
    """Ten times as many requests as another's get no more than their half; weights are kept (fault 135)."""
    setting = Setting(_STAGES, seconds=60.0, warm_seconds=30.0)
    equal = run(setting, [Source(10.0, 0, Terms("loud")), Source(1.0, 0, Terms("quiet"))])
    assert equal.finished_by["quiet/0"] == pytest.approx(equal.finished_by["loud/0"], rel=0.1)
    rules = AdmissionRules(wait_factor=0.2, weights=Weights(tenants={"gold": 3.0}))
    weighted = run(
        Setting(_STAGES, rules, seconds=80.0, warm_seconds=30.0),
        [Source(2.0, 0, Terms("gold")), Source(2.0, 0, Terms("tin"))],
    )
    assert weighted.finished_by["gold/0"] == pytest.approx(3 * weighted.finished_by["tin/0"], rel=0.15)


def test_the_lowest_priority_does_not_starve() -> None:
    """Where every priority asks for twice the set, each gets its part, four times that of the one below."""
    setting = Setting(_STAGES, seconds=200.0, warm_seconds=40.0)
    found = run(setting, [Source(2.0, 0, Terms(priority=level)) for level in (1, 0, -1)])
    low, plain, high = (found.finished_by[f"/{level}"] for level in (-1, 0, 1))
    assert low >= 20
    assert plain == pytest.approx(4 * low, rel=0.3)
    assert high == pytest.approx(4 * plain, rel=0.15)


def test_several_proxies_fill_one_set() -> None:
    """Asked equally or one alone, and when one dies: the stages are busy, and nobody waits long."""
    setting = Setting(_STAGES, proxies=3, seconds=80.0, warm_seconds=40.0)
    unloaded = run(setting, [Source(0.05)])
    for sources, deaths in (
        ([Source(0.7, proxy) for proxy in range(3)], ()),
        ([Source(2.0)], ()),
        ([Source(0.7, proxy) for proxy in range(3)], ((60.0, 2),)),
    ):
        found = run(Setting(_STAGES, proxies=3, seconds=80.0, warm_seconds=40.0, deaths=deaths), sources)
        assert found.rate >= 0.93 * setting.rate
        assert found.quantile(0.95) <= 1.3 * unloaded.quantile(0.95)
