"""``onepiece bench moves``: how long it takes to decide which instances should move.

A set of so many nodes and actors, one on each device, of twelve stages of four workflows; service times and
loads are made up. ``quiet`` is a load that all stages keep up with, ``shifted`` one that went over to
one workflow, so that as many moves are chosen as one decision may have. The seconds are those of
the processor, so that what else runs on the machine plays little part.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from typing import Any, Final

from attrs import frozen

from onepiece.core.capacity import CapacityModel, Demand, WorkflowShape
from onepiece.core.inventory import DeviceKind
from onepiece.core.move_board import DeviceInfo, Load, PlacedActor
from onepiece.core.moves import Decision, decide
from onepiece.core.service_times import StageProfile, Timing
from onepiece.errors import ConfigError

_GIB: Final = 1 << 30
_STAGES: Final = 12
_WORKFLOWS: Final = 4
_WINDOW_SECONDS: Final = 60.0
_BUSY: Final = {"quiet": (0.7,) * _WORKFLOWS, "shifted": (2.0, 0.1, 0.1, 0.1)}
"""How busy each workflow keeps an even share of the devices."""


@frozen
class MadeUpSet:
    """The whole set."""

    model: CapacityModel
    devices: tuple[DeviceInfo, ...]
    actors: tuple[PlacedActor, ...]

    @classmethod
    def of(cls, nodes: int, actors: int) -> "MadeUpSet":
        """One actor on each device, their stages in turn."""
        names = [f"stage-{number:02}" for number in range(_STAGES)]
        stages = [
            StageProfile(name, (Timing(0.5 + 0.3 * n),), memory_bytes=20 * _GIB, load_seconds=30.0)
            for n, name in enumerate(names)
        ]
        each = _STAGES // _WORKFLOWS
        shapes = [
            WorkflowShape.line(f"workflow-{n}", names[n * each : (n + 1) * each]) for n in range(_WORKFLOWS)
        ]
        devices = tuple(
            DeviceInfo(f"node-{n % nodes:05}", f"cuda:{n // nodes}", DeviceKind.GPU, 80 * _GIB)
            for n in range(actors)
        )
        placed = tuple(
            PlacedActor(n, names[n % _STAGES], device.node_id, (device.device,))
            for n, device in enumerate(devices)
        )
        return cls(CapacityModel.of(stages, shapes), devices, placed)

    def load(self, busy: Sequence[float]) -> Load:
        """Each workflow's busiest stage is so busy."""
        instances = len(self.actors) / _STAGES
        demands = []
        for share, shape in zip(busy, self.model.workflows.values(), strict=True):
            slowest = max(self.model.stages[step.stage].best("").mean_seconds for step in shape.steps)
            demands.append(Demand(shape.name, share * instances / slowest))
        return Load(tuple(demands), _WINDOW_SECONDS)


def run(argv: Sequence[str]) -> None:
    """Measure and print; raises ``ConfigError`` for arguments that cannot be."""
    parser = argparse.ArgumentParser(prog="onepiece bench moves", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000, help="of the set (default: %(default)s)")
    parser.add_argument("--actors", type=int, default=10_000, help="of the set (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="of each load (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    if not (1 <= arguments.nodes <= arguments.actors and arguments.rounds >= 1):
        raise ConfigError("--nodes and --rounds are at least 1, and --actors at least --nodes")
    made = MadeUpSet.of(arguments.nodes, arguments.actors)
    rows = [_measured(made, name, arguments.rounds) for name in _BUSY]
    machine = f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}"
    if arguments.json:
        print(json.dumps({"machine": machine, "actors": arguments.actors, "rows": rows}, indent=1))
        return
    print(f"{arguments.nodes} nodes, {arguments.actors} actors; {machine}\n")
    print(f"{'load':<10}{'moves':>7}{'least, ms':>12}{'median, ms':>12}{'most, ms':>12}")
    for row in rows:
        times = "".join(f"{row[key]:>12.2f}" for key in ("least_ms", "median_ms", "most_ms"))
        print(f"{row['load']:<10}{row['moves']:>7}{times}")


def _measured(made: MadeUpSet, name: str, rounds: int) -> dict[str, Any]:
    seconds: list[float] = []
    decision: Decision | None = None
    for _ in range(rounds):
        begun = time.process_time()
        decision = decide(made.model, [made.load(_BUSY[name])], made.devices, made.actors)
        seconds.append(time.process_time() - begun)
    assert decision is not None
    seconds.sort()
    return {
        "load": name,
        "moves": len(decision.moves),
        "least_ms": 1000 * seconds[0],
        "median_ms": 1000 * seconds[rounds // 2],
        "most_ms": 1000 * seconds[-1],
    }
