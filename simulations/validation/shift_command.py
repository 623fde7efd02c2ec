"""``python -m simulations shift``: demand shifts from one workflow to another on real nodes that may move.

Eight devices on two nodes on this machine's loopback, ``--rebalance on``, five instances of red and three of
blue. Requests come at random (Poisson), and none is sent again. After a while most of them are blue.

What the model says is the best rate of the new mix that any split of the devices bears, or what is offered if
that is less. The exit status is 0 if no more than three moves brought the set within a tenth of that, and
every request has its result.
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import asdict, define, field, frozen

from onepiece.client import Client
from onepiece.core.capacity import CapacityModel, Demand
from onepiece.profiles import model_of
from onepiece.runtime.devices import parse_device
from onepiece.runtime.profiling import ProfileOptions, profile_workflow
from onepiece.runtime.workflows import import_workflow
from simulations.capacity_trace import arrivals, step
from simulations.plot import Chart, Line
from simulations.validation.compare import WITHIN, quantile
from simulations.validation.load import LoadRun, run_load
from simulations.validation.outcome import add_outputs, carry_out
from simulations.validation.real_set import open_real_set

HELP: Final = "shift the demand between two workflows on real nodes, and see what moves"
MODULE: Final = "simulations.validation.shifting_workflows"
NAMES: Final = ("red", "blue")
WORKERS, DEVICES = 2, 4
BEFORE: Final = (10.0, 4.0)
AFTER: Final = (4.0, 14.0)
"""Requests a second of each."""
MOVES_MAX: Final = 3
SAMPLES: Final = 12
LOOK_SECONDS: Final = 0.5
BIN_SECONDS: Final = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add = parser.add_argument
    add("--before", type=float, default=30.0, metavar="S", help="seconds until the shift (%(default)s)")
    add("--after", type=float, default=90.0, metavar="S", help="seconds behind it (%(default)s)")
    add("--last", type=float, default=30.0, metavar="S", help="of these the part that counts (%(default)s)")
    add("--rebalance-seconds", type=float, default=6.0, metavar="S", help="shortest window (%(default)s)")
    add("--seed", type=int, default=0, help="of the arrivals (%(default)s)")
    add_outputs(parser)


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns its exit status."""
    return carry_out("shift", _measure, options)


@frozen
class Look:
    """What there was at a moment of the run: ready instances of both, and moves that were done."""

    seconds: float
    ready: tuple[int, ...]
    done: int


@frozen
class Part:
    """A part of the run."""

    name: str
    begin: float
    end: float
    offered: float
    finished: float
    p95_seconds: float
    instances: tuple[int, ...]
    """Ready at its end."""


@define(eq=False)
class Shift:
    """The whole run."""

    model: CapacityModel
    shift_at: float
    last_seconds: float
    run: LoadRun
    looks: Sequence[Look]
    view: Mapping[str, Any]
    """The placement at the end."""
    seconds: float
    parts: list[Part] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        counted_from = self.seconds - self.last_seconds
        moved_at = min(max(self.moved_at, self.shift_at), counted_from)
        parts = [
            self._part("before", self.shift_at / 2, self.shift_at),
            self._part("until the last move is done", self.shift_at, moved_at),
            self._part("the backlog", moved_at, counted_from),
            self._part("after", counted_from, self.seconds),
        ]
        self.parts = [part for part in parts if part.end > part.begin]

    @property
    def moved_at(self) -> float:
        """When the last move was seen to be done."""
        last = self.looks[-1].done
        return next(look.seconds for look in self.looks if look.done == last)

    @property
    def optimum(self) -> float:
        """The best rate of the new mix that a split of the devices bears, or the offered one."""
        demands = _demands(AFTER)
        keys = _stages()
        total = WORKERS * DEVICES
        splits = ({keys[0]: count, keys[1]: total - count} for count in range(1, total))
        return min(sum(AFTER), max(self.model.bound(demands, each).rate for each in splits))

    @property
    def moves(self) -> int:
        """How many were done."""
        return int(self.view["done"])

    @property
    def holds(self) -> bool:
        """Whether it came back, in few moves, and lost nothing."""
        back = self.parts[-1].finished >= (1 - WITHIN) * self.optimum
        return back and 1 <= self.moves <= MOVES_MAX and not self.view["abandoned"] and not self.run.failed()

    def _part(self, name: str, begin: float, end: float) -> Part:
        done = self.run.latencies(begin, end)
        offered = sum(begin <= at < end for at, _ in self.run.arrivals())
        seconds = end - begin
        ready = [look.ready for look in self.looks if look.seconds <= max(end, self.looks[0].seconds)][-1]
        rates = (offered / seconds, len(done) / seconds) if seconds else (0.0, 0.0)
        return Part(name, begin, end, *rates, quantile(done, 0.95), ready)

    def told(self) -> str:
        """A table, and what was to be reached."""
        lines = [
            "| part | seconds | offered | finished | P95 | red, blue at its end |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_line(part) for part in self.parts]
        share = self.parts[-1].finished / self.optimum
        lost = len(self.run.failed())
        lines += [
            "",
            f"the model's optimum: {self.optimum:.1f}/s; reached {share:.0%} of it",
            f"{self.moves} moves, {self.view['abandoned']} abandoned",
            f"{len(self.run.samples)} requests, {lost} without a result",
            f"holds: {'yes' if self.holds else 'no'}",
        ]
        return "\n".join(lines)

    def plain(self) -> dict[str, Any]:
        """All of it for JSON."""
        samples = self.run.samples
        return {
            "holds": self.holds,
            "optimum": self.optimum,
            "moves": self.moves,
            "parts": [asdict(part) for part in self.parts],
            "looks": [asdict(look) for look in self.looks],
            "placement": dict(self.view),
            "requests": [[s.submitted_at - self.run.began_at, s.seconds, s.demand] for s in samples],
        }

    def charts(self) -> list[Chart]:
        """Requests over time, and instances."""
        lines = []
        for number, name in enumerate(NAMES):
            ends = [s.done_at - self.run.began_at for s in self.run.samples if s.demand == number]
            lines.append(_over_time(f"{name}, finished", ends, self.seconds))
            begins = [at for at, demand in self.run.arrivals() if demand == number]
            lines.append(_over_time(f"{name}, offered", begins, self.seconds))
        ready = [
            Line(name, [(look.seconds, look.ready[number]) for look in self.looks])
            for number, name in enumerate(NAMES)
        ]
        return [
            Chart("Requests", "seconds", "a second", lines),
            Chart("Instances that are ready", "seconds", "", ready),
        ]


def _line(part: Part) -> str:
    return (
        f"| {part.name} | {part.begin:.0f} to {part.end:.0f} | {part.offered:.1f}/s "
        f"| {part.finished:.1f}/s | {part.p95_seconds:.2f} s | {part.instances[0]}, {part.instances[1]} |"
    )


def _over_time(name: str, moments: Sequence[float], seconds: float) -> Line:
    bins = [0] * int(seconds / BIN_SECONDS)
    for at in moments:
        if at < len(bins) * BIN_SECONDS:
            bins[int(at / BIN_SECONDS)] += 1
    return Line(name, [((n + 0.5) * BIN_SECONDS, count / BIN_SECONDS) for n, count in enumerate(bins)])


def _stages() -> tuple[str, ...]:
    return tuple(f"{MODULE}:{name}_stage" for name in NAMES)


def _demands(rates: Sequence[float]) -> tuple[Demand, ...]:
    return tuple(Demand(name, rate) for name, rate in zip(NAMES, rates, strict=True))


async def _measure(options: argparse.Namespace) -> Shift:
    device = parse_device("cpu:0=1GiB")
    profiles = [
        await profile_workflow(
            import_workflow(f"{MODULE}:{name}"), {"number": 1}, device, ProfileOptions(samples=SAMPLES)
        )
        for name in NAMES
    ]
    seconds = options.before + options.after
    rates = [step(before, after, options.before) for before, after in zip(BEFORE, AFTER, strict=True)]
    moving = ("--rebalance", "on", "--rebalance-seconds", f"{options.rebalance_seconds:g}")
    references = [f"{MODULE}:{name}" for name in NAMES]
    async with open_real_set(references, WORKERS, DEVICES, moving) as client:
        looks: list[Look] = []
        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(_look(client, looks))
            inputs = [{"number": number} for number in range(len(NAMES))]
            trace = arrivals(rates, seconds, options.seed)
            done = await run_load(client, _demands(BEFORE), inputs, trace)
            looking.cancel()
        view = await client.placement()
    return Shift(model_of(tuple(profiles)), options.before, options.last, done, looks, view, seconds)


async def _look(client: Client, looks: list[Look]) -> None:
    """See what there is every now and then, until cancelled."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while True:
        view = await client.placement()
        ready = {stage["stage"]: stage["ready"] for stage in view["stages"]}
        looks.append(Look(loop.time() - begun, tuple(ready[key] for key in _stages()), view["done"]))
        await asyncio.sleep(LOOK_SECONDS)
