"""What ``onepiece profile`` does beyond its command, which ``tests/cli/test_plan.py`` tests."""

import types
from typing import Any

import pytest

from onepiece import StageContext, _torch, stage, workflow
from onepiece.core.inventory import Device, DeviceKind
from onepiece.errors import StageFailed
from onepiece.runtime.profiling import ProfileOptions, profile_workflow

_CPU = Device("cpu:0", DeviceKind.CPU, 1 << 30)
_GIB = 1 << 30


@stage
async def double(ctx: StageContext[None], text: str) -> str:
    """Twice the text; nothing of an empty one."""
    if not text:
        raise ValueError("nothing to double")
    return text + text


@workflow
def fourfold(text: str) -> str:
    """A stage that is visited twice."""
    return double(double(text))


async def test_a_stage_that_is_visited_twice_is_measured_as_one() -> None:
    """Both visits of every run count, and the warm-up does not."""
    profile = await profile_workflow(fourfold, {"text": "ab"}, _CPU, ProfileOptions(samples=3, warm_up=2))
    (measured,) = profile.stages
    assert measured.timings[0].samples == 6
    assert len(profile.shape.steps) == 2


async def test_a_stage_s_error_ends_it() -> None:
    """What a stage raises is raised, with the stage's name."""
    with pytest.raises(ExceptionGroup) as raised:
        await profile_workflow(fourfold, {"text": ""}, _CPU, ProfileOptions(samples=1))
    failed = raised.value.split(StageFailed)[0]
    assert failed is not None
    assert "nothing to double" in str(failed.exceptions[0])


async def test_on_a_gpu_the_memory_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded and at most used beyond that, as torch would say it; the real one is not at hand here."""
    uses = iter(
        [(0, 0), (0, 0), (2 * _GIB, 2 * _GIB), (2 * _GIB, 2 * _GIB), (2 * _GIB, 5 * _GIB)] + [(0, 0)] * 2
    )
    monkeypatch.setattr(_torch, "cuda_use", lambda _index: next(uses))
    monkeypatch.setattr(_torch, "cuda_forget", lambda _index: None)
    monkeypatch.setattr(_torch, "cuda_name", lambda _index: "a GPU")
    device = Device("cuda:0", DeviceKind.CPU, 80 * _GIB)  # the stage wants a processor
    profile = await profile_workflow(fourfold, {"text": "ab"}, device, ProfileOptions(samples=1, warm_up=0))
    assert profile.stages[0].memory_bytes == 5 * _GIB
    assert "a GPU" in profile.measured_on


def test_torch_is_asked_only_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has no torch has taken nothing of a GPU; one that has is asked."""
    asked: list[Any] = []
    cuda = types.SimpleNamespace(
        memory_allocated=lambda index: 7,
        max_memory_allocated=lambda index: 9,
        is_initialized=lambda: True,
        reset_peak_memory_stats=asked.append,
        get_device_name=lambda index: "a GPU",
    )
    monkeypatch.setattr(_torch, "_module", lambda: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(_torch, "is_imported", lambda: False)
    assert (_torch.cuda_use(1), _torch.cuda_name(1)) == ((0, 0), "")
    _torch.cuda_forget(1)
    assert not asked
    monkeypatch.setattr(_torch, "is_imported", lambda: True)
    assert (_torch.cuda_use(1), _torch.cuda_name(1)) == ((7, 9), "a GPU")
    _torch.cuda_forget(1)
    assert asked == [1]
