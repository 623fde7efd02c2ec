"""What a validation found, as a table, as JSON and as charts."""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import asdict, define, field

from onepiece.core.capacity import CapacityModel, Demand
from simulations.capacity_world import Delays, Place
from simulations.plot import Chart, Line
from simulations.validation.compare import (
    WITHIN,
    Finishes,
    Row,
    Side,
    instances_of,
    quantile,
    stage_seconds,
)
from simulations.validation.load import LoadRun

BIN_SECONDS: Final = 5.0


@define(eq=False)
class Validation:
    """Both sides of all runs."""

    model: CapacityModel
    demands: tuple[Demand, ...]
    places: tuple[Place, ...]
    delays: Delays
    rows: list[Row] = field(factory=list)
    slower: dict[str, Mapping[str, float]] = field(factory=dict)
    """By run: how much longer each stage took than its profile says."""
    runs: dict[str, tuple[LoadRun, Finishes]] = field(factory=dict)

    @property
    def holds(self) -> bool:
        """Whether both sides are near enough everywhere."""
        return all(row.holds for row in self.rows)

    def bound(self, mix: Sequence[Demand]) -> float:
        """Requests a second that the busiest stage bears."""
        return self.model.bound(mix, instances_of(self.places)).rate

    def note(self, name: str, run: LoadRun, simulated: Finishes) -> None:
        """A run is done on both sides."""
        failed = run.failed()
        if failed:
            raise RuntimeError(f"{len(failed)} requests of run {name} failed, the first with: {failed[0]}")
        self.runs[name] = run, simulated
        self.slower[name] = stage_seconds(self.model, self.demands, run.samples)

    def told(self) -> str:
        """A table, and what may explain it."""
        names = ("run", "requests", "done, real", "simulated", "difference", "P95, real", "simulated, mean")
        lines = [
            f"| {' | '.join((*names, 'its runs', 'difference'))} |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [_line(row) for row in self.rows]
        delays = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in asdict(self.delays).items())
        lines += ["", f"beside the stages: {delays}"]
        for name, slower in self.slower.items():
            if not slower:
                continue
            worst = max(slower, key=lambda stage: abs(slower[stage]))
            lines.append(
                f"{name}: {worst} took {slower[worst]:+.1%} more than its profile, the others are nearer"
            )
        return "\n".join([*lines, f"all within {WITHIN:.0%}: {'yes' if self.holds else 'no'}"])

    def plain(self) -> dict[str, Any]:
        """All of it for JSON."""
        python = platform.python_version()
        return {
            "machine": f"{platform.machine()}, {os.cpu_count()} processors, Python {python}",
            "holds": self.holds,
            "rows": [
                {
                    **asdict(row),
                    "rate_difference": row.rate_difference,
                    "p95_difference": row.p95_difference,
                    "holds": row.holds,
                }
                for row in self.rows
            ],
            "delays": asdict(self.delays),
            "stages_slower_than_profiled": self.slower,
            "places": [asdict(place) for place in self.places],
            "stages": [asdict(stage, value_serializer=_value) for stage in self.model.stages.values()],
            "runs": {name: self._run_plain(*both) for name, both in self.runs.items()},
        }

    def _run_plain(self, run: LoadRun, simulated: Finishes) -> dict[str, Any]:
        return {
            "arrivals": [[round(at, 4), number] for at, number in run.arrivals()],
            "real": [
                [round(s.done_at - run.began_at, 4), round(s.seconds, 4), s.demand] for s in run.samples
            ],
            "simulated": [
                [round(at, 4), round(seconds, 4), number] for at, seconds, number in simulated.ends
            ],
        }

    def charts(self) -> list[Chart]:
        """Both sides over the load, one load's latencies, and the step over time."""
        rows = [row for row in self.rows if row.name.startswith("load")]

        def over_load(title: str, up: str, value: Callable[[Side], float]) -> Chart:
            lines = [
                Line("real", [(row.load, value(row.real)) for row in rows]),
                Line("simulated", [(row.load, value(row.simulated)) for row in rows]),
            ]
            return Chart(title, "load of the busiest stage", up, lines)

        found = [
            over_load("Requests done", "a second", lambda side: side.rate),
            over_load("P95", "seconds", lambda side: side.p95_seconds),
        ]
        below = [row for row in rows if row.load < 1]
        if below:
            found.append(self._quantiles(max(below, key=lambda row: row.load).name))
        if "step" in self.runs:
            found.append(self._over_time())
        return found

    def _quantiles(self, name: str) -> Chart:
        run, simulated = self.runs[name]
        shares = [place / 100 for place in range(1, 100)]
        sides = {
            "real": [sample.seconds for sample in run.samples],
            "simulated": [seconds for _, seconds, _ in simulated.ends],
        }
        lines = [Line(side, [(s, quantile(seconds, s)) for s in shares]) for side, seconds in sides.items()]
        return Chart(f"Latencies at {name}", "share of requests", "seconds", lines)

    def _over_time(self) -> Chart:
        run, simulated = self.runs["step"]
        ends = {
            "real": [(s.done_at - run.began_at, s.demand) for s in run.samples],
            "simulated": [(at, number) for at, _, number in simulated.ends],
        }
        lines = []
        for workflow in ("video", "picture"):
            numbers = {n for n, demand in enumerate(self.demands) if demand.workflow == workflow}
            for side, moments in ends.items():
                bins: dict[int, int] = {}
                for at, number in moments:
                    if number in numbers:
                        bins[int(at / BIN_SECONDS)] = bins.get(int(at / BIN_SECONDS), 0) + 1
                points = [(place * BIN_SECONDS, bins[place] / BIN_SECONDS) for place in sorted(bins)]
                lines.append(Line(f"{workflow}, {side}", points))
        return Chart("A step of the mix", "seconds", "done a second", lines)


def _line(row: Row) -> str:
    real, simulated = row.real, row.simulated
    return (
        f"| {row.name} | {row.requests} | {real.rate:.2f}/s | {simulated.rate:.2f}/s "
        f"| {row.rate_difference:+.1%} | {real.p95_seconds:.2f} s | {simulated.p95_seconds:.2f} s "
        f"| {row.p95_range[0]:.2f} to {row.p95_range[1]:.2f} s "
        f"| {row.p95_difference:+.1%} |"
    )


def _value(_instance: object, _attribute: object, value: Any) -> Any:
    return value.value if hasattr(value, "value") else value
