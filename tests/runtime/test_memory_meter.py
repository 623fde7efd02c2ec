"""What a stage takes of its device's memory at most, as its actor reports it."""

import os
from typing import Any

import pytest

from onepiece import Workflow, _torch
from onepiece.runtime.memory_meter import DeviceMeter, ProcessMeter, most_resident_bytes, resident_bytes
from tests.runtime.actor_rig import actor_rig
from tests.runtime.hoarding_stages import LOADED_BYTES, WORKING_BYTES, hoard, hoard_together

_ELSE_BYTES = 48 << 20
"""What an interpreter takes beside that, at most."""
_GIVEN_BACK_BYTES = 4 << 20
"""What it had before and did not need any more."""


@pytest.mark.parametrize("workflow", [hoard, hoard_together], ids=["process", "ranks"])
async def test_a_process_of_its_own_tells_its_peak(workflow: Workflow[Any, Any]) -> None:
    """Loaded, and the most that a run took; what is given back later does not lower it."""
    async with actor_rig(workflow) as rigged:
        loaded = rigged.actor.report().work.memory_bytes
        assert LOADED_BYTES - _GIVEN_BACK_BYTES <= loaded < LOADED_BYTES + _ELSE_BYTES
        await rigged.submit("a", runs=1)
        await rigged.outcome("a")
        peak = rigged.actor.report().work.memory_bytes
        both = LOADED_BYTES + WORKING_BYTES
        assert both - _GIVEN_BACK_BYTES <= peak < both + _ELSE_BYTES
        await rigged.submit("b", runs=0)
        await rigged.outcome("b")
        assert rigged.actor.report().work.memory_bytes == peak


def test_this_process_has_what_it_has() -> None:
    """The most is not less than what there is now; of a process that is not there nothing is known."""
    now = resident_bytes(os.getpid())
    assert 0 < now <= most_resident_bytes()
    assert resident_bytes(1 << 30) == 0


class _Gpu:
    """A GPU's memory as torch would tell it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        monkeypatch.setattr(_torch, "cuda_use", lambda index: (self.now, self.most))
        monkeypatch.setattr(_torch, "cuda_forget", self._forget)

    def _forget(self, _index: int) -> None:
        self.most = self.now

    def use(self, used: int) -> None:
        """So much from now on."""
        self.now, self.most = used, max(self.most, used)


def test_in_the_node_s_process_a_stage_is_measured_while_it_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before is not its own; where two share the GPU nothing is said of either."""
    gpu, meter = _Gpu(monkeypatch), DeviceMeter("cuda:0")
    gpu.use(900)
    gpu.use(100)
    meter.enter("a")
    gpu.use(500)
    gpu.use(300)
    assert meter.peak_bytes("a") == 400
    meter.enter("b")
    assert (meter.peak_bytes("a"), meter.peak_bytes("b")) == (0, 0)
    meter.leave("a")
    assert meter.peak_bytes("b") == 0
    meter.leave("b")
    assert meter.peak_bytes("b") == 0
    gpu.use(150)
    meter.enter("c")
    gpu.use(160)
    assert meter.peak_bytes("c") == 10


def test_a_processor_in_the_node_s_process_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the node does there cannot be told apart; a helper on a GPU tells what torch does."""
    meter = DeviceMeter("cpu:0")
    meter.enter("a")
    assert meter.peak_bytes("a") == 0
    gpu = _Gpu(monkeypatch)
    apart = ProcessMeter.begun("cuda:1")
    gpu.use(700)
    gpu.use(200)
    assert apart.peak_bytes() == 700
