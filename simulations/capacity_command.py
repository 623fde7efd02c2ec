r"""``python -m simulations capacity``: what a set of many GPUs does under a load, as discrete events.

From profiles (``onepiece profile``) and arrivals: Poisson at a steady rate, with a day's curve, with bursts,
with a step from one workflow to another, or recorded in a CSV file. The instances at first are
those that the planner gives for the mean load; the others idle, until the load makes them move. The same
seed gives the same run.

    python -m simulations capacity --profile video.json --rate video=40 --gpus 4000 --arrivals day \
        --seconds 86400 --json day.json --plot day.png
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from onepiece.cli.columns import bytes_text, columns, seconds_text
from onepiece.cli.numbers import number_from, whole_from
from onepiece.cli.plan import demand_of
from onepiece.core.capacity import CapacityModel, Demand
from onepiece.core.inventory import DeviceKind
from onepiece.core.planning import UTILISATION_MAX, monolithic, plan_for_devices, plan_for_rate
from onepiece.errors import ConfigError, OnePieceError
from onepiece.profiles import model_of, read_profile
from simulations.capacity_record import Record
from simulations.capacity_trace import (
    Arrival,
    Rate,
    arrivals,
    bursts,
    day_curve,
    even_arrivals,
    recorded,
    steady,
    step,
)
from simulations.capacity_world import Delays, World, WorldOptions
from simulations.plot import Chart, Line, draw_charts

HELP: Final = "simulate a set of many GPUs under a load, with the product's own decisions"
_GIB: Final = 1 << 30
_INTERVALS: Final = 240
_MOVES_SHOWN: Final = 10
GPUS_MAX: Final = 100_000
_GIB_MAX: Final = 1 << 20
_SECONDS_MAX: Final = 366 * 86_400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add = parser.add_argument
    add("--profile", action="append", required=True, metavar="FILE", help="one for each workflow")
    rate = "WORKFLOW=NUMBER or WORKFLOW/SIZE_CLASS=NUMBER, the mean rate; may be given again"
    add("--rate", action="append", required=True, metavar="R", help=rate)
    add("--gpus", type=whole_from(1, GPUS_MAX), help="of the set (default: those that the planner wants)")
    add("--per-node", type=whole_from(1, GPUS_MAX), default=8, help="GPUs of a node (%(default)s)")
    add(
        "--gpu-memory",
        type=number_from(0, _GIB_MAX, above=True),
        default=80.0,
        metavar="GIB",
        help="of each (%(default)s)",
    )
    _add_arrivals(parser)
    add(
        "--seconds",
        type=number_from(0, _SECONDS_MAX, above=True),
        default=3600.0,
        help="of the set's time (%(default)s)",
    )
    add("--warm-up", type=number_from(0), default=0.0, help="seconds that the totals leave out (%(default)s)")
    add(
        "--timeout", type=number_from(0, above=True), help="refuse requests that are predicted to take longer"
    )
    add(
        "--hop", type=number_from(0), default=0.0, metavar="SECONDS", help="from stage to stage (%(default)s)"
    )
    add(
        "--utilisation",
        type=number_from(0.001, 1),
        default=UTILISATION_MAX,
        help="planned at first (%(default)s)",
    )
    add("--no-moves", action="store_true", help="instances stay as they are planned")
    add("--monolithic", action="store_true", help="each instance holds a whole workflow")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write what happened")
    add("--plot", type=Path, metavar="PNG", help="draw it")


def _add_arrivals(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    kinds = ("steady", "even", "day", "bursts", "step")
    add("--arrivals", choices=kinds, default="steady", help="how requests come (%(default)s)")
    add(
        "--swing",
        type=number_from(0, 1),
        default=0.5,
        help="day: so much more at 18 h and less at 6 h (%(default)s)",
    )
    add("--burst-factor", type=number_from(0), default=4.0, help="bursts: times the mean rate (%(default)s)")
    add(
        "--burst-seconds",
        type=number_from(0, above=True),
        default=60.0,
        help="bursts: how long (%(default)s)",
    )
    add(
        "--burst-every",
        type=number_from(0, above=True),
        default=600.0,
        help="bursts: from one to the next (%(default)s)",
    )
    add("--to", action="append", default=[], metavar="R", help="step: the rates in the second half")
    add("--recorded", type=Path, metavar="CSV", help="seconds,workflow,size_class instead of drawn arrivals")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns its exit status."""
    try:
        return _run(options)
    except (OnePieceError, OSError) as error:
        sys.stderr.write(f"capacity: {error}\n")
        return 2


def _run(options: argparse.Namespace) -> int:
    _check_options(options)
    model = model_of(tuple(read_profile(Path(path)) for path in options.profile))
    demands = tuple(demand_of(model, text, 1.0) for text in options.rate)
    model = monolithic(model) if options.monolithic else model
    instances = instances_for(model, demands, options.gpus, options.utilisation)
    gpus = options.gpus or model.devices(instances)
    if gpus > GPUS_MAX:
        raise ConfigError(f"that takes {gpus} GPUs, and {GPUS_MAX} are simulated at most; lower --rate")
    _tell_too_large(model, instances, options.gpu_memory)
    world_options = WorldOptions(
        gpus=gpus,
        per_node=options.per_node,
        gpu_bytes=round(options.gpu_memory * _GIB),
        moves=not options.no_moves,
        timeout_seconds=options.timeout,
        delays=Delays(hop=options.hop),
        seed=options.seed,
    )
    begun = time.perf_counter()
    world = World(model, demands, instances, world_options)
    world.record.interval_seconds = options.seconds / _INTERVALS
    world.record.warm_up_seconds = options.warm_up
    record = world.run(_trace(options, model, demands), options.seconds)
    taken = time.perf_counter() - begun
    summary = record.summary(options.seconds)
    print(_told(summary, record, instances, world_options.gpus))
    sys.stderr.write(f"{options.seconds:.0f} s of the set in {taken:.1f} s\n")
    if options.json is not None:
        options.json.write_text(json.dumps(_plain(options, summary, record, instances), indent=1) + "\n")
    if options.plot is not None:
        draw_charts(options.plot, _charts(record))
    return 0


def _check_options(options: argparse.Namespace) -> None:
    if options.warm_up >= options.seconds:
        raise ConfigError(f"--warm-up {options.warm_up:g} leaves nothing of --seconds {options.seconds:g}")
    if options.arrivals == "bursts" and options.burst_seconds >= options.burst_every:
        raise ConfigError(
            f"bursts of {options.burst_seconds:g} s every {options.burst_every:g} s never end; give a "
            "--burst-every above --burst-seconds"
        )
    if options.to and (options.arrivals != "step" or options.recorded is not None):
        raise ConfigError("--to is the rate behind a step; give --arrivals step with it")
    for path in filter(None, (options.json, options.plot)):
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"{path} cannot be written: it is a directory, or in one that is not there")


def _tell_too_large(model: CapacityModel, instances: Mapping[str, int], gpu_memory_gib: float) -> None:
    for stage in instances:
        profile = model.stages[stage]
        if profile.kind is DeviceKind.GPU and profile.memory_bytes > gpu_memory_gib * _GIB:
            sys.stderr.write(
                f"{stage} needs {bytes_text(profile.memory_bytes)}, which a GPU of {gpu_memory_gib:g} GiB "
                "does not have; it is simulated as if it had\n"
            )


def instances_for(
    model: CapacityModel, demands: Sequence[Demand], gpus: int | None, utilisation: float
) -> dict[str, int]:
    """What there is at first: for the load if the GPUs are enough, else the best that they allow."""
    plan = plan_for_rate(model, demands, utilisation_max=utilisation)
    if gpus is not None and model.devices(plan.instances) > gpus:
        plan = plan_for_devices(model, demands, gpus, utilisation_max=utilisation)
    return dict(plan.instances)


def _trace(options: argparse.Namespace, model: CapacityModel, demands: Sequence[Demand]) -> Iterable[Arrival]:
    if options.recorded is not None:
        found = recorded(options.recorded, demands)
        known = sum(at <= options.seconds for at, _ in found)
        if not known:
            raise ConfigError(f"the trace {options.recorded} has no request in {options.seconds:g} s")
        if known < len(found):
            sys.stderr.write(f"{len(found) - known} requests come behind --seconds, and are left out\n")
        return found
    if options.arrivals == "even":
        return even_arrivals(demands, options.seconds)
    changed = [demand_of(model, text, 1.0) for text in options.to]
    later = {(each.workflow, each.size_class): each.rate for each in changed}
    unknown = later.keys() - {(each.workflow, each.size_class) for each in demands}
    if unknown:
        raise ConfigError(f"--to {'/'.join(min(unknown))}: give it a --rate too, 0 if none come at first")

    def rate_of(demand: Demand) -> Rate:
        match options.arrivals:
            case "day":
                return day_curve(demand.rate, options.swing)
            case "bursts":
                every = options.burst_every
                return bursts(demand.rate, options.burst_factor, options.burst_seconds, every)
            case "step":
                after = later.get((demand.workflow, demand.size_class), demand.rate)
                return step(demand.rate, after, options.seconds / 2)
            case _:
                return steady(demand.rate)

    return arrivals([rate_of(demand) for demand in demands], options.seconds, options.seed)


# --- showing


def _told(summary: Mapping[str, Any], record: Record, instances: Mapping[str, int], gpus: int) -> str:
    last = record.series()[-1]["instances"] if record.intervals else {}
    busy = summary["busy_workers"]
    rows = [
        (stage, str(count), str(last.get(stage, "")), f"{busy.get(stage, 0.0):.1f}")
        for stage, count in instances.items()
    ]
    per_request = summary["gpu_seconds_per_request"]
    requests = (
        f"{gpus} GPUs, {summary['offered']} requests offered, {summary['refused']} refused, "
        f"{summary['finished']} finished: {summary['rate']:.4g} a second"
    )
    names = ("mean", "p50", "p95", "p99")
    lines = [
        requests,
        ", ".join(f"{name} {seconds_text(summary[f'{name}_seconds'])}" for name in names),
        "" if per_request is None else f"{per_request:.4g} GPU seconds for a request, idle ones included",
        "",
        columns(("stage", "at first", "at the end", "busy"), rows),
        "",
        f"{summary['moves']} moves, {summary['given_back']} instances given back",
    ]
    for at, move in record.moves[:_MOVES_SHOWN]:
        where = "beside" if move.is_beside else "behind" if move.replaces else "on idle devices"
        lines.append(
            f"  {at:.0f} s: {move.stage} on {move.node_id} {where}: {move.reason}; gains "
            f"{move.gain_requests:.0f}, costs {move.cost_requests:.0f} requests"
        )
    if len(record.moves) > _MOVES_SHOWN:
        lines.append(f"  and {summary['moves'] - _MOVES_SHOWN} more")
    for at, give in record.given_back[:_MOVES_SHOWN]:
        lines.append(f"  {at:.0f} s: {give.stage} on {give.node_id} is given back: {give.reason}")
    return "\n".join(lines)


def _plain(
    options: argparse.Namespace, summary: Mapping[str, Any], record: Record, instances: Mapping[str, int]
) -> dict[str, Any]:
    given = {name: value for name, value in vars(options).items() if name not in {"run", "command"}}
    return {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in given.items()},
        "instances_at_first": dict(instances),
        "summary": summary,
        "series": record.series(),
        "moves": [
            {
                "seconds": at,
                "stage": move.stage,
                "node": move.node_id,
                "replaces": list(move.replaces),
                "is_beside": move.is_beside,
                "gain_requests": move.gain_requests,
                "cost_requests": move.cost_requests,
                "reason": move.reason,
            }
            for at, move in record.moves
        ],
        "given_back": [
            {"seconds": at, "stage": give.stage, "node": give.node_id, "reason": give.reason}
            for at, give in record.given_back
        ],
    }


def _charts(record: Record) -> list[Chart]:
    rows = record.series()
    seconds = record.interval_seconds

    def over_time(name: str, value: str, scale: float = 1.0) -> Line:
        return Line(name, [(row["seconds"], row[value] * scale) for row in rows])

    stages = [
        Line(stage, [(row["seconds"], row["instances"][stage]) for row in rows if stage in row["instances"]])
        for stage in record.stages
    ]
    rates = [over_time(name, name, 1 / seconds) for name in ("accepted", "refused", "finished")]
    latencies = [over_time("P95", "p95_seconds"), over_time("mean", "mean_seconds")]
    return [
        Chart("Requests", "seconds", "a second", rates),
        Chart("Latency", "seconds", "seconds", latencies),
        Chart("Instances that serve", "seconds", "", stages),
    ]
