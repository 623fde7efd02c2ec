"""A forecast: when a request that comes now would be done, from what is under way and what stages take.

Every stage has a *line* of workers, each with the moment when it will be free. A request that is taken
reserves one worker of each stage on its way, from its inputs' arrival on for the stage's time; the next one
sees that. So deciding costs a few operations for each stage, however many requests are under way. Now and
then, when there was news, the lines are drawn anew from where each request really is (``redraw``): stages
that have ended are over, one that runs has the rest of its time, the others queue in order of arrival.

Between stages, and before the first, is the *way*: a body that is read, a record that is kept, an output that
is sent. A request that comes now needs a worker only after it, so that a worker that is about to be free
need not idle for so long. How long the ways to a stage are is learned, as stages' times are.

A proxy that has only a *share* of the set's capacity sees as many workers as its share is of all, rounded
up, each of which is occupied for longer than a request takes, so that the rate is that of the share.

What this promises:

* With times that do not vary and one proxy the forecast of a line of stages is exact.
* It never lets more be reserved than the share of the workers can do: each reservation takes a worker's time.
* What has ended is not in it: after the last ``drop`` all lines are free at the next ``redraw``.
* Nothing was measured of a stage, or no instance of it is ready: there is no forecast (None).

What it does not know: batches, priorities (who overtakes at the stages), how ways differ.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from attrs import define, field, frozen

from onepiece.core.capacity import Step, WorkflowShape
from onepiece.core.live_times import LiveTimes

REPORT_SECONDS: Final = 0.15
"""How old news of a stage may be: a request is not known to be waiting just since nobody said it runs."""
REDRAW_SECONDS: Final = 0.01
REDRAW_SECONDS_PER_REQUEST: Final = 0.0001
"""Between two redraws at least; more requests take longer, and must not take all of the processor."""
WAY_SECONDS_MAX: Final = 1.0
"""Of a way to a stage: what takes longer is a client's own slowness, or the error of a clock."""

_ENDS_MAX: Final = 256
_SHARE_CHANGE: Final = 0.01
"""Relative; less is no news."""


@frozen
class Prediction:
    """When a request would be done, and how long it takes where nobody else is there."""

    finish_at: float
    unloaded_seconds: float
    at: float

    @property
    def wait_seconds(self) -> float:
        """How much of it is waiting for others."""
        return max(0.0, self.finish_at - self.at - self.unloaded_seconds)


@frozen
class _Step:
    stage: str
    after: tuple[int, ...]
    before: tuple[int, ...]
    way_seconds: float
    """From when what it comes after is done until it has its inputs."""
    seconds: float
    spread_seconds: float


@frozen
class _Way:
    """The steps of a workflow with their times, for one size class."""

    steps: tuple[_Step, ...]
    places: Mapping[str, int]
    unloaded_seconds: float


@define(eq=False)
class _Flight:
    """A request under way."""

    workflow: str
    size_class: str
    since: float
    queued: dict[str, float] = field(factory=dict)
    started: dict[str, float] = field(factory=dict)
    done: dict[str, float] = field(factory=dict)


@define(eq=False)
class _Line:
    """The workers of one stage that this proxy may fill: when each is free."""

    free_at: list[float]
    stretch: float
    """A reservation occupies its worker for this many times its seconds."""

    def reserve(self, ready_at: float, seconds: float) -> float:
        """Let the worker that is free first do something that is ready then; its end."""
        begin = max(ready_at, self.free_at[0])
        heapq.heapreplace(self.free_at, begin + seconds * self.stretch)
        return begin + seconds


@define(eq=False)
class Forecast:
    """The requests of one proxy, and the workers of the set; see the module's text."""

    times: LiveTimes
    share: float = 1.0
    _seen_ways: LiveTimes = field(factory=LiveTimes, init=False)
    """How long the ways to stages were."""
    _ends: dict[str, deque[float]] = field(factory=dict, init=False)
    """When stages were last done with a request: before that their workers were not free."""
    _shapes: dict[str, WorkflowShape] = field(factory=dict)
    _workers: dict[str, int] = field(factory=dict)
    _flights: dict[str, _Flight] = field(factory=dict)
    _in_flight: dict[tuple[str, str], int] = field(factory=dict)
    _lines: dict[str, _Line] = field(factory=dict)
    _ways: dict[tuple[str, str], _Way | None] = field(factory=dict)
    _is_stale: bool = True
    _drawn_at: float = -math.inf
    _drawn_share: float = 1.0

    def set_up(self, shapes: Mapping[str, WorkflowShape], workers: Mapping[str, int]) -> None:
        """The workflows that are served; how many requests each stage works on at once, in the whole set."""
        self._shapes, self._workers = dict(shapes), dict(workers)
        self._seen_ways.keep_stages(workers)
        self._ends = {stage: deque(self._ends.get(stage, ()), _ENDS_MAX) for stage in workers}
        self._lines.clear()
        self._ways.clear()
        self._is_stale, self._drawn_at = True, -math.inf

    def set_share(self, share: float) -> None:
        """This proxy may fill this part of the set."""
        assert 0 < share <= 1 + 1e-9
        if abs(share - self.share) > _SHARE_CHANGE * self.share:
            self.share, self._is_stale = share, True

    def note_times(self) -> None:
        """Times have changed, by what others have seen."""
        self._is_stale = True

    @property
    def workflows(self) -> tuple[str, ...]:
        """The names of those that are served."""
        return tuple(self._shapes)

    @property
    def in_flight(self) -> int:
        """How many requests are in it."""
        return len(self._flights)

    def in_flight_of(self, workflow: str, size_class: str) -> int:
        """How many of them are of this workflow and size class."""
        return self._in_flight.get((workflow, size_class), 0)

    def predict(self, workflow: str, size_class: str, now: float) -> Prediction | None:
        """When such a request would be done if it came now; None if that cannot be known."""
        self._redraw_if_stale(now)
        way = self._way(workflow, size_class)
        if way is None:
            return None
        return Prediction(self._walk(way, now), way.unloaded_seconds, now)

    def load_of(self, workflow: str, size_class: str) -> float | None:
        """Seconds of the whole set that one such request takes: the reciprocal of its largest rate."""
        way = self._way(workflow, size_class)
        if way is None:
            return None
        busy: dict[str, float] = {}
        for step in way.steps:
            busy[step.stage] = busy.get(step.stage, 0.0) + step.seconds
        return max(seconds / self._workers[stage] for stage, seconds in busy.items())

    def workers_of(self, workflow: str) -> int:
        """How many requests the stages of a workflow work on at once, in this proxy's share."""
        shape = self._shapes.get(workflow)
        stages = () if shape is None else shape.visits
        return math.ceil(self.share * sum(self._workers.get(stage, 0) for stage in stages))

    def take(self, uid: str, workflow: str, size_class: str, now: float) -> None:
        """A request has been accepted."""
        assert uid not in self._flights
        way = self._way(workflow, size_class)
        if way is not None:
            self._reserve(way, now)
        self._flights[uid] = _Flight(workflow, size_class, now)
        key = (workflow, size_class)
        self._in_flight[key] = self._in_flight.get(key, 0) + 1

    def queued(self, uid: str, step: str, at: float, now: float) -> None:
        """A request is at a stage with all its inputs; ``at`` is by that node's clock."""
        flight = self._flights.get(uid)
        if flight is not None:
            flight.queued[step] = min(at, now)
            self._is_stale = True

    def started(self, uid: str, step: str, at: float, now: float) -> None:
        """A stage has begun with a request; ``at`` is by its node's clock."""
        flight = self._flights.get(uid)
        if flight is not None:
            flight.started[step] = min(at, now)
            self._is_stale = True

    def finished(self, uid: str, step: str, at: float, now: float) -> None:
        """A stage has done its part, and its time is known."""
        flight = self._flights.get(uid)
        if flight is None:
            return
        self._is_stale = True
        flight.done[step] = min(at, now)
        shape = self._shapes.get(flight.workflow)
        found = next((each for each in shape.steps if each.name == step), None) if shape else None
        if found is None:
            return
        if found.stage in self._ends:
            self._ends[found.stage].append(flight.done[step])
        begun = flight.started.get(step)
        if begun is not None:
            self.times.note(found.stage, flight.size_class, at - begun)
            self._note_way(flight, found)

    def _note_way(self, flight: _Flight, step: Step) -> None:
        """How long a request, done with what comes before, was on its way to this step, if that is known."""
        left_at = max((flight.done.get(name, math.inf) for name in step.after), default=flight.since)
        seconds = flight.queued.get(step.name, -math.inf) - left_at
        if seconds >= 0:
            self._seen_ways.note(step.stage, flight.size_class, min(seconds, WAY_SECONDS_MAX))

    def drop(self, uid: str) -> None:
        """A request has ended, however; no error if it is not here."""
        flight = self._flights.pop(uid, None)
        if flight is None:
            return
        self._is_stale = True
        key = (flight.workflow, flight.size_class)
        self._in_flight[key] -= 1
        if not self._in_flight[key]:
            del self._in_flight[key]

    def check_invariants(self) -> None:
        """Assert what must hold between two calls."""
        assert sum(self._in_flight.values()) == len(self._flights)
        assert all(count > 0 for count in self._in_flight.values())
        for stage, line in self._lines.items():
            workers = self._workers[stage] * self._drawn_share
            assert abs(len(line.free_at) / line.stretch - workers) < 1e-6 * max(1.0, workers)

    def redraw(self, now: float) -> None:
        """Draw all lines anew from where the requests are."""
        self._is_stale, self._drawn_at, self._drawn_share = False, now, self.share
        self._ways.clear()
        self._lines = {
            stage: _line(workers * self.share, now - REPORT_SECONDS, self._ends[stage])
            for stage, workers in self._workers.items()
            if workers > 0
        }
        waiting = _Waiting(self._lines)
        for flight in self._flights.values():
            way = self._way(flight.workflow, flight.size_class)
            if way is not None:
                waiting.add(flight, way, now)
        waiting.place_all()

    def _redraw_if_stale(self, now: float) -> None:
        pause = REDRAW_SECONDS + REDRAW_SECONDS_PER_REQUEST * len(self._flights)
        if self._is_stale and not self._drawn_at <= now < self._drawn_at + pause:
            self.redraw(now)

    def _walk(self, way: _Way, now: float) -> float:
        """The end of a request that comes now."""
        ends: list[float] = []
        last = now
        for step in way.steps:
            ready_at = now
            for place in step.after:
                ready_at = max(ready_at, ends[place])
            end = max(ready_at + step.way_seconds, self._lines[step.stage].free_at[0]) + step.seconds
            ends.append(end)
            last = max(last, end)
        return last

    def _reserve(self, way: _Way, now: float) -> None:
        ends: list[float] = []
        for step in way.steps:
            ready_at = max((ends[place] for place in step.after), default=now) + step.way_seconds
            ends.append(self._lines[step.stage].reserve(ready_at, step.seconds))

    def _way(self, workflow: str, size_class: str) -> _Way | None:
        key = (workflow, size_class)
        if key not in self._ways:
            if len(self._ways) >= _WAYS_MAX:
                self._ways.clear()
            self._ways[key] = self._new_way(workflow, size_class)
        return self._ways[key]

    def _new_way(self, workflow: str, size_class: str) -> _Way | None:
        shape = self._shapes.get(workflow)
        if shape is None:
            return None
        places = {step.name: place for place, step in enumerate(shape.steps)}
        steps: list[_Step] = []
        ends: list[float] = []
        for step in shape.steps:
            time = self.times.time(step.stage, size_class)
            if time is None or step.stage not in self._lines:
                return None
            after = tuple(places[name] for name in step.after)
            before = tuple(places[each.name] for each in shape.steps if step.name in each.after)
            on_way = self._seen_ways.mean_seconds(step.stage, size_class) or 0.0
            steps.append(_Step(step.stage, after, before, on_way, *time))
            ends.append(max((ends[place] for place in after), default=0.0) + on_way + time[0])
        return _Way(tuple(steps), places, max(ends))


_WAYS_MAX: Final = 4096
"""Size classes are named by clients."""


@define(eq=False)
class _Waiting:
    """Places what requests have still to do on the lines: first what runs, then in order of arrival."""

    lines: Mapping[str, _Line]
    _queue: list[tuple[float, int, int, "_Placing"]] = field(factory=list)
    _count: int = 0

    def add(self, flight: _Flight, way: _Way, now: float) -> None:
        """Note how far a request is; its running stages take their workers at once."""
        earliest = now - REPORT_SECONDS
        ends: list[float | None] = [None] * len(way.steps)
        for name, at in flight.done.items():
            if name in way.places:
                ends[way.places[name]] = at
        for name, at in flight.started.items():
            place = way.places.get(name)
            if place is None or ends[place] is not None:
                continue
            step = way.steps[place]
            line = self.lines[step.stage]
            ends_at = at + step.seconds
            late = max(0.0, earliest - ends_at)  # what is late may take as long again
            leaves_at = max(ends_at, earliest + step.spread_seconds, earliest + late)
            heapq.heapreplace(line.free_at, leaves_at + step.seconds * (line.stretch - 1))
            ends[place] = leaves_at
        queued = {way.places[name]: at for name, at in flight.queued.items() if name in way.places}
        placing = _Placing(way, ends, flight.since, queued, earliest)
        for place, end in enumerate(ends):
            if end is None:
                self._push(placing, place)

    def place_all(self) -> None:
        """Let the rest queue."""
        while self._queue:
            ready_at, _, place, placing = heapq.heappop(self._queue)
            step = placing.way.steps[place]
            placing.ends[place] = self.lines[step.stage].reserve(ready_at, step.seconds)
            for following in step.before:
                self._push(placing, following)

    def _push(self, placing: "_Placing", place: int) -> None:
        """Queue a step whose inputs' moments are known, once."""
        if placing.ends[place] is not None:
            return
        step = placing.way.steps[place]
        left_at = placing.since
        for before in step.after:
            end = placing.ends[before]
            if end is None:
                return
            left_at = max(left_at, end)
        ready_at = max(placing.earliest, placing.queued.get(place, left_at + step.way_seconds))
        self._count += 1
        heapq.heappush(self._queue, (ready_at, self._count, place, placing))


@frozen(eq=False)
class _Placing:
    """A request on its way through ``_Waiting``: the end of each step, as far as it is known."""

    way: _Way
    ends: list[float | None]
    since: float
    queued: Mapping[int, float]
    """When it came to a step, as far as that is known."""
    earliest: float
    """What is not known to run does not run for longer."""


def _line(workers: float, free_at: float, ends: Iterable[float]) -> _Line:
    """A line of so many workers, which need not be a whole number; those that ended later are free later."""
    whole = max(1, math.ceil(workers - 1e-9))
    late = sorted((end for end in ends if end > free_at), reverse=True)[:whole]
    return _Line([free_at] * (whole - len(late)) + late[::-1], whole / workers)  # sorted, so a heap
