"""An input is sent again that had been taken, as its actor left unseen: nothing of that is left behind."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from attrs import evolve

from onepiece.log import captured
from onepiece.node import leftovers
from onepiece.runtime import intake
from onepiece.runtime.intake import Intake
from simulations.cluster import Cluster
from simulations.loop import branch, elapse, virtual_loop
from simulations.sim_checks import _left_at
from simulations.sim_clients import Wish
from simulations.sim_machine import SimMachine
from simulations.sim_plan import Plan
from simulations.sim_trace import Trace

STAGES: Final = "simulations.sim_stages"
WISH: Final = Wish(0, 0.0, "diamond", 100, 0.2, "none", "split", 600.0, None, None)
TRIES: Final = 10
"""Whether it is sent again hangs on who hears first of what; in half of the runs it is."""
STEP_SECONDS: Final = 0.01
ENOUGH_SECONDS: Final = 8.0
"""For all that nodes have to say of themselves; none of them asks."""


class LeavingReceiver(Cluster):
    """``left`` stands still behind what it sent to ``merge``, until the actor that took that has left."""

    when_taken: Callable[[], None]

    def machine_of(self, stage: str) -> SimMachine:
        """Where a stage runs, as the manager has it."""
        node = self.machines[0].node
        assert node is not None
        [actor] = node.env.routes.table.actors_for(f"{STAGES}:{stage}")
        return next(machine for machine in self.machines if machine.name == actor.node_id)

    async def _load(self) -> None:
        sender, receiver = self.machine_of("left"), self.machine_of("merge")
        assert sender not in {*self.machines[:2], receiver, self.machine_of("right")}, "others wait for it"
        taken = asyncio.get_running_loop().create_future()

        def stand_still() -> None:
            sender.pause()
            assert receiver.node is not None
            receiver.node.draining.begin()
            taken.set_result(None)

        self.when_taken = stand_still
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.clients.run([WISH]))
            await taken
            await self._left(receiver)
            sender.resume()
        await elapse(ENOUGH_SECONDS)
        for machine in self.machines:
            assert machine.node is not None
            for what in _left_at(machine.node):
                self.trace.fail(f"{machine.name} {what}")

    async def _left(self, machine: SimMachine) -> None:
        """Wait until the actors of a node have left."""
        assert machine.node is not None
        assert machine.node.host is not None
        while machine.node.host.reports():  # noqa: ASYNC110 - of another process, which sets no event here
            await asyncio.sleep(STEP_SECONDS)


def simulate(number: int, directory: Path, patch: pytest.MonkeyPatch) -> int:
    """Run it once; returns how often the output of ``left`` was taken."""
    directory.mkdir()
    took: list[str] = []
    take: Callable[..., None] = Intake._take

    def noted_take(self: Intake, held: Any, graph: Any) -> None:
        take(self, held, graph)
        if (held.header.source, held.header.node) == ("left", "merge"):
            took.append(self.env.node_id)
            if len(took) == 1:
                cluster.when_taken()

    patch.setattr(Intake, "_take", noted_take)
    plan = evolve(Plan.draw(0, nodes=7, requests=1).without_faults(), proxies=2, stores=2, poison=0.0)
    rng = Random(f"run {number}")
    loop = virtual_loop(branch(rng), lambda _: None)
    trace = Trace(loop, aloud=False)
    loop.on_exception = trace.take_exception
    with captured(trace.take_log):
        cluster = LeavingReceiver(loop, plan, directory, trace, rng)
        loop.run_until_complete(cluster.run())
        loop.close()
    assert not trace.problems
    assert [ending.is_result for ending in cluster.clients.requests[0].endings] == [True]
    return len(took)


def test_an_input_that_is_sent_again_hears_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits at another actor for a sibling that does not come, where nobody knows of it (fault 118)."""
    monkeypatch.setattr(leftovers, "FIRST_SECONDS", 1e9)
    monkeypatch.setattr(intake, "_SEEN_SECONDS", 0.0)  # as if the sender stood still for longer
    for number in range(TRIES):
        with monkeypatch.context() as patch:
            if simulate(number, tmp_path / f"{number}", patch) == 2:
                return
    pytest.fail("it was never sent again: this shows nothing")
