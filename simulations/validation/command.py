"""``python -m simulations validate``: real node processes and the simulated set, side by side.

Three workflows of stages that wait as for a GPU run on nodes on this machine's loopback, at several loads and
with one step of the mix. The stages are profiled before (``onepiece profile``), and what passes beside their
times is measured with requests that wait for nobody. The arrivals of each run are recorded and fed to the
simulator (``python -m simulations capacity``) with that profile and those delays. Loads are of the busiest
stage; one above 1 shows what the set can do at most. The exit status is 0 if throughput and P95 are within a
tenth of the real ones everywhere.

It wants a machine that has little else to do: real nodes wait for its processors, simulated ones do not.
"""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from attrs import evolve

from onepiece.client import Client
from onepiece.core.capacity import Demand
from onepiece.profiles import WorkflowProfile, model_of
from onepiece.runtime.devices import parse_device
from onepiece.runtime.profiling import ProfileOptions, profile_workflow
from onepiece.runtime.workflows import import_workflow
from simulations.capacity_trace import Rate, arrivals, steady, step
from simulations.validation import workflows
from simulations.validation.compare import Finishes, compared, delays_of, simulate
from simulations.validation.load import LoadRun, Sample, run_load
from simulations.validation.outcome import add_outputs, carry_out
from simulations.validation.real_set import open_real_set, places_of
from simulations.validation.report import Validation

HELP: Final = "run workflows on real nodes and in the simulated set, and compare throughput and P95"
MODULE: Final = "simulations.validation.workflows"
WORKERS, DEVICES = 3, 7
LOADS: Final = (0.5, 0.7, 0.85, 1.25)
LONG_SHARE: Final = 0.3
MIX: Final = {"video": 4.0, "picture": 5.0, "collage": 2.5}
STEP: Final = (
    {"video": 4.0, "picture": 2.0, "collage": 1.0},
    {"video": 1.0, "picture": 6.0, "collage": 3.0},
)
"""Requests a second before and behind the step: only their proportions count, the load is ``--step``."""
NEWS_SECONDS: Final = (0.14, 0.08)
"""Until nodes, and the proxy, hear that a stage is done: means measured at a load of 0.85 and of the step. A
report waits up to 0.1 s for company; of an output a node has to see first that it was taken, equally late."""
CALIBRATIONS: Final = 4
CROWDED: Final = "collage"
CROWD: Final = 20
SAMPLES: Final = 12
SIMULATIONS: Final = 20
Inputs: TypeAlias = "list[dict[str, Any]]"
"""By demand."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    add = parser.add_argument
    add("--loads", type=float, nargs="*", default=LOADS, metavar="X", help="default: %(default)s")
    add("--step", type=float, default=0.8, metavar="X", help="load on both sides of the step (%(default)s)")
    add("--seconds", type=float, default=45.0, help="measured at each load (%(default)s)")
    add("--warm-up", type=float, default=10.0, help="seconds before that (%(default)s)")
    add("--stretch", type=float, default=1.0, metavar="X", help="stages take so many times as long")
    add("--seed", type=int, default=0, help="of the arrivals (%(default)s)")
    add_outputs(parser)


def run(options: argparse.Namespace) -> int:
    """Carry the command out; returns its exit status."""
    return carry_out("validate", _measure, options)


async def _measure(options: argparse.Namespace) -> Validation:
    profiles = await asyncio.gather(*(_profile(name, options.stretch) for name in workflows.WORKFLOWS))
    model = model_of(tuple(profiles))
    demands = demands_of(MIX)
    names = [f"{MODULE}:{name}" for name in workflows.WORKFLOWS]
    async with open_real_set(names, WORKERS, DEVICES) as client:
        inputs = _inputs(demands, options.stretch)
        samples = await _calibrate(client, demands, inputs)
        crowd = await _crowd(client, demands, inputs)
        delays = delays_of(model, demands, samples, crowd, NEWS_SECONDS)
        found = Validation(model, demands, await places_of(client), delays)
        for load in options.loads:
            await _steady(client, found, load, options)
        if options.step:
            await _step(client, found, options)
    return found


def demands_of(mix: Mapping[str, float]) -> tuple[Demand, ...]:
    """Requests a second of each workflow, short and long ones."""
    shares = {"short": 1 - LONG_SHARE, "long": LONG_SHARE}
    return tuple(
        Demand(workflow, rate * shares[size_class], size_class)
        for workflow, rate in mix.items()
        for size_class in workflows.SCALES
    )


async def _profile(name: str, stretch: float) -> WorkflowProfile:
    found: WorkflowProfile | None = None
    for size_class, scale in workflows.SCALES.items():
        measured = await profile_workflow(
            import_workflow(f"{MODULE}:{name}"),
            {"scale": scale * stretch},
            parse_device("cpu:0=1GiB"),
            ProfileOptions(samples=SAMPLES, size_class=size_class),
        )
        found = measured if found is None else found.with_timings_of(measured)
    assert found is not None
    return found


def _inputs(demands: Sequence[Demand], stretch: float) -> Inputs:
    return [{"scale": workflows.SCALES[demand.size_class] * stretch} for demand in demands]


async def _calibrate(client: Client, demands: Sequence[Demand], inputs: Inputs) -> list[Sample]:
    """Requests that wait for nobody: one after the other, behind one that warms up."""
    samples: list[Sample] = []
    for number in range(len(demands)):
        runs = [await run_load(client, demands, inputs, [(0.0, number)]) for _ in range(CALIBRATIONS + 1)]
        samples += [sample for run in runs[1:] for sample in run.samples]
    return samples


async def _crowd(client: Client, demands: Sequence[Demand], inputs: Inputs) -> tuple[Sample, ...]:
    """Requests that come at once to a workflow whose first stage has one instance."""
    number = next(n for n, demand in enumerate(demands) if demand.workflow == CROWDED)
    return (await run_load(client, demands, inputs, [(0.0, number)] * CROWD)).samples


async def _steady(client: Client, found: Validation, load: float, options: argparse.Namespace) -> None:
    factor = load * found.bound(found.demands) / sum(demand.rate for demand in found.demands)
    rates = [steady(demand.rate * factor) for demand in found.demands]
    end = options.warm_up + options.seconds
    name = f"load {load:g}"
    both = await _both(client, found, name, rates, end, options)
    found.rows.append(compared(name, load, *both, options.warm_up, end))


async def _step(client: Client, found: Validation, options: argparse.Namespace) -> None:
    sides = []
    for mix in STEP:
        demands = demands_of(mix)
        factor = options.step * found.bound(demands) / sum(demand.rate for demand in demands)
        sides.append([evolve(demand, rate=demand.rate * factor) for demand in demands])
    middle = options.warm_up + options.seconds
    rates = [step(before.rate, after.rate, middle) for before, after in zip(*sides, strict=True)]
    end = middle + options.seconds
    both = await _both(client, found, "step", rates, end, options)
    found.rows.append(compared("before the step", options.step, *both, options.warm_up, middle))
    found.rows.append(compared("behind the step", options.step, *both, middle, end))


async def _both(
    client: Client,
    found: Validation,
    name: str,
    rates: Sequence[Rate],
    seconds: float,
    options: argparse.Namespace,
) -> tuple[LoadRun, list[Finishes]]:
    sys.stderr.write(f"{name}\n")
    trace = arrivals(rates, seconds, options.seed)
    run = await run_load(client, found.demands, _inputs(found.demands, options.stretch), trace)
    last = max(sample.done_at for sample in run.samples) - run.began_at
    simulated = [
        simulate(found.model, found.demands, found.places, found.delays, run, 2 * last, seed)
        for seed in range(SIMULATIONS)
    ]
    found.note(name, run, simulated[0])
    return run, simulated
