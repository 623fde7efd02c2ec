"""The simulated transport passes the public suite, in every weather; the loop runs the same way twice."""

import time
from random import Random

import pytest
from attrs import evolve

from simulations.loop import virtual_loop
from simulations.sim_network import Network, Weather
from simulations.sim_transport import SimTransport
from transports import Address, open_receiver, open_sender
from transports.testing import ALL_CHANNEL_CHECKS, ALL_REMOTE_MEMORY_CHECKS, Check, Setting

SEEDS = range(3)


def _run(check: Check, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    faults: list[object] = []
    loop = virtual_loop(rng, faults.append)
    monkeypatch.setattr(time, "monotonic", loop.time)  # it is what the checks' swaps expire by
    for opens in (open_receiver, open_sender):
        monkeypatch.setitem(opens.__wrapped__.__kwdefaults__, "clock", loop.time)  # type: ignore[union-attr]  # of contextlib

    async def main() -> None:
        weather = evolve(Weather.draw(rng), flip_chance=0.0)  # only the ring knows of flips
        network = Network(loop, rng, weather)
        host = network.host("check")
        host.process = loop.world
        await check(Setting(SimTransport(network, host), Address.parse("sim://check")))

    loop.run_until_complete(main())
    loop.close()
    assert not faults


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "check", [*ALL_REMOTE_MEMORY_CHECKS, *ALL_CHANNEL_CHECKS], ids=lambda check: check.__name__
)
def test_conformance(check: Check, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the check's docstring says holds over simulated wires."""
    _run(check, seed, monkeypatch)
