"""Each moment of a hop at which a node can die, and what becomes of the request.

The workflow is ``draw -> refine -> render -> store``; the hop is that from ``refine`` to ``render``, or
that from ``render`` to the result store. What ran once must not run again without need: that is what
retaining is for.
"""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from attrs import frozen

import onepiece
from onepiece.client import Client
from onepiece.messages import STORE
from onepiece.runtime.counts import ASKED, CHECKPOINT, PEER_LOST
from tests.node import hop_stages
from tests.node.hop_crashes import LEASE_SECONDS, HopSet, Trap, open_hop_set, set_trap
from tests.node.proxy_set import until

REQUEST_SECONDS = 40.0


@frozen
class Case:
    """Who dies when, and how often each stage is to run in all."""

    moment: str
    dies: str
    draw: int = 1
    refine: int = 1
    render: int = 1
    source: str = "refine"
    target: str = "render"
    workflow: str = "film"
    resent: tuple[str, ...] = ()
    """Why the output of the hop was sent again, as metrics have it: one of these."""

    @property
    def runs(self) -> dict[str, int]:
        """By stage."""
        return {"draw": self.draw, "refine": self.refine, "render": self.render}

    @property
    def lease_seconds(self) -> float:
        """Longer where the sender may find that its message is lost, after the two seconds of its patience.

        Were the receiver declared dead in the same moment, sender and owner would both have the message sent
        again, perhaps to two actors.
        """
        return LEASE_SECONDS + 1.5 if self.dies == "receiver" else LEASE_SECONDS

    def __str__(self) -> str:
        hop = f"{self.source} to {self.target.removeprefix('@')}"
        return f"{self.workflow}: {hop}, {self.moment}, {self.dies} dies"


CASES = (
    # What was computed is with its node alone: the stage runs again, from what draw's node retains.
    Case("computed", "sender", refine=2),
    Case("retained", "sender", refine=2),
    # A reservation without its message: the ring of the receiver recovers, and the stage runs again.
    Case("reserved", "sender", refine=2),
    Case("written", "sender", refine=2),
    # The message is there: the sender is not needed any more.
    Case("committed", "sender"),
    Case("acknowledged", "sender"),
    # The receiver dies: what it had not taken is lost with its ring, and the sender sends it elsewhere; what
    # it had taken comes again from the sender, which has retained it.
    Case("retained", "receiver"),
    Case("reserved", "receiver"),
    Case("written", "receiver"),
    Case("committed", "receiver"),
    Case("taken", "receiver", resent=(PEER_LOST, ASKED)),
    Case("running", "receiver", render=2),
    # Both sides of the edge are gone: draw's output was let go when refine's was taken.
    Case("running", "both", draw=2, refine=2, render=2),
    # A dead decoder never costs a finished denoise: it comes from the store nodes, if one still has it.
    Case("running", "both", render=2, workflow="film_kept", resent=(CHECKPOINT,)),
    Case("running", "both and a store", render=2, workflow="film_kept"),
    Case("running", "both and the owner", render=2, workflow="film_kept"),
    Case("running", "both and every checkpoint", draw=2, refine=2, render=2, workflow="film_kept"),
    # The last hop: into the result store.
    Case("computed", "sender", render=2, source="render", target=STORE),
    Case("retained", "sender", render=2, source="render", target=STORE),
    Case("reserved", "sender", render=2, source="render", target=STORE),
    Case("written", "sender", render=2, source="render", target=STORE),
    Case("committed", "sender", source="render", target=STORE),
    # The owner dies: another proxy adopts the request.
    Case("accepted", "owner"),
    Case("taken", "owner"),
    Case("running", "owner"),
    Case("finished", "owner", source="render", target=STORE),
)


async def whoever(case: Case, a_set: HopSet, trap: Trap) -> None:
    """Those of the case die."""
    match case.dies:
        case "sender":
            await trap.fed.wait()  # else its own input is sent elsewhere at once: nobody saw it taken
            await a_set.die(trap.sender)
        case "receiver":
            await a_set.die(trap.receiver or _receiver(a_set, trap))
        case "both" | "both and a store" | "both and the owner" | "both and every checkpoint":
            await until(lambda: "draw" not in a_set.retained_sources())
            await also(case, a_set)
            await a_set.die(trap.sender)
            await a_set.die(trap.receiver)
        case "owner":
            await a_set.die("proxy-1")


async def also(case: Case, a_set: HopSet) -> None:
    """Who or what is lost besides the two nodes of the hop."""
    match case.dies:
        case "both and a store":
            assert len(a_set.checkpoint_holders()) == 2, "the inputs were let go before all copies were there"
            await a_set.die(next(name for name in a_set.checkpoint_holders() if name != "manager"))
        case "both and the owner":
            await a_set.die("proxy-1")
        case "both and every checkpoint":
            await a_set.forget_checkpoints()


def _receiver(a_set: HopSet, trap: Trap) -> str:
    """The node that runs an actor of the target, and is not the sender."""
    proxy = a_set.living["proxy-1"].node.proxy
    assert proxy is not None
    return next(
        view.node
        for view in proxy.nodes()
        if view.node != trap.sender
        and any(actor["stage"].endswith(f":{trap.target}") for actor in view.actors)
    )


def resent(a_set: HopSet) -> Counter[tuple[str, str]]:
    """The outputs that living nodes have sent again, by where they go and why."""
    return sum((living.node.env.counts.resent for living in a_set.living.values()), Counter())


async def result_of(client: Client, workflow: str, key: str) -> str:
    """Submit, again with the same key if the proxy dies meanwhile, and wait for the result."""
    handle = await client.submit(workflow, {"text": "ahoy"}, timeout=REQUEST_SECONDS, key=key)
    result: str = await handle.result()
    return result


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES, ids=str)
async def test_death_at_each_moment_of_a_hop(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request finishes, with the right result; no stage runs more often than what was lost asks for."""
    trap = Trap(case.moment, case.source, case.target)
    set_trap(trap, monkeypatch)
    async with open_hop_set(tmp_path, trap, case.workflow, lease_seconds=case.lease_seconds) as a_set:
        urls = [a_set.living[name].node.http for name in ("proxy-1", "proxy-2")]
        async with onepiece.connect(",".join(str(url) for url in urls)) as client:
            async with asyncio.timeout(REQUEST_SECONDS), asyncio.TaskGroup() as tasks:
                request = tasks.create_task(result_of(client, case.workflow, "order-17"))
                await trap.caught.wait()
                await whoever(case, a_set, trap)
                trap.let_go.set()
            assert request.result() == "ahoy, drawn, refined, rendered"
            assert dict(hop_stages.runs) == case.runs
            if case.resent:
                counted = resent(a_set)
                target = f"tests.node.hop_stages:{case.target}"
                assert sum(counted[target, reason] for reason in case.resent) >= 1, counted
            hop_stages.hooks.clear()
            again = await result_of(client, case.workflow, "order-18")
            assert again == "ahoy, drawn, refined, rendered", "rings are blocked"
            await until(lambda: not a_set.checkpoint_holders())
