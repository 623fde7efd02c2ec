"""What staging saves: GPU seconds for a finished request, monolithic against staged, at one P95.

Every figure is published by somebody who measured it, or counted; each case names its sources and what it
takes for granted. The rest follows from the capacity model: for a rate and a P95 that both can meet, the
planner says how many GPUs each needs. Service times are taken to be constant, since nobody publishes their
spread, and requests to come from independent clients.
"""

import math
from collections.abc import Sequence
from typing import Final

from attrs import frozen

from onepiece.core.capacity import CapacityModel, Demand, WorkflowShape
from onepiece.core.planning import plan_for_rate
from onepiece.core.service_times import StageProfile, Timing

LIGHTX2V_BLOG: Final = "LightX2V, blogs/ZH_CN/DisaggBlogPost.md, commit 71c2f96"
LIGHTX2V_TABLE: Final = "LightX2V, README.md, tables for Wan2.1-I2V-14B-480P, commit 0328dc8"
SGLANG_PAGE: Final = "SGLang, docs/diffusion/disaggregation.md, commit 3b42f4f"

SLACK: Final = 1.5
"""The P95 that both must meet: so many times the slower one's time without load."""
SCALES: Final = (1, 2, 4, 8, 16, 32, 64)
"""Loads: how many monolithic instances they keep busy."""
_ALL: Final = "whole"


@frozen
class Part:
    """A stage: its seconds for a request, on so many GPUs."""

    name: str
    seconds: float
    devices: int = 1

    @property
    def device_seconds(self) -> float:
        """GPU seconds for a request, waiting apart."""
        return self.seconds * self.devices


@frozen
class Case:
    """One comparison: the same requests, through one process or through stages."""

    name: str
    whole: Part
    """What a request takes through the monolithic process."""
    stages: tuple[Part, ...]
    conditions: str
    sources: tuple[str, ...]

    @property
    def limit(self) -> float:
        """The factor where the load is so large that neither rounding nor waiting matters."""
        return self.whole.device_seconds / sum(stage.device_seconds for stage in self.stages)


@frozen
class Point:
    """What a load needs."""

    scale: int
    rate: float
    p95_seconds: float
    monolithic_gpus: int
    staged_gpus: int

    @property
    def factor(self) -> float:
        """How many times as many GPU seconds a request takes in the monolithic process."""
        return self.monolithic_gpus / self.staged_gpus


def compare(case: Case, scales: Sequence[int] = SCALES) -> list[Point]:
    """The GPUs that both need for each load, at the same P95."""
    whole, staged = _line([case.whole]), _line(case.stages)
    slower = max(case.whole.seconds, sum(stage.seconds for stage in case.stages))
    target = SLACK * slower
    points = []
    for scale in scales:
        demands = [Demand(_ALL, scale / case.whole.seconds)]
        needed = [
            model.devices(plan_for_rate(model, demands, target, utilisation_max=1.0).instances)
            for model in (whole, staged)
        ]
        points.append(Point(scale, demands[0].rate, target, *needed))
    return points


@frozen
class TurnsPoint:
    """Workflows that are busy in turn, one of them at a time."""

    workflows: int
    fixed_gpus: int
    moving_gpus: int

    @property
    def factor(self) -> float:
        """How many times as many GPUs it takes if none may change its workflow."""
        return self.fixed_gpus / self.moving_gpus


def take_turns(case: Case, scale: int, counts: Sequence[int]) -> list[TurnsPoint]:
    """GPUs for workflows of which one is busy at a time, each with stages of its own.

    ``fixed``: each has what it needs when it is busy. ``moving``: the GPUs are where the load is, at once and
    for nothing, while every stage of every workflow keeps one instance. So it is the most that moving can
    gain.
    """
    model = _line(case.stages)
    target = SLACK * sum(stage.seconds for stage in case.stages)
    plan = plan_for_rate(model, [Demand(_ALL, scale / case.whole.seconds)], target, utilisation_max=1.0)
    busy = model.devices(plan.instances)
    idle = sum(stage.devices for stage in case.stages)
    return [TurnsPoint(count, count * busy, busy + (count - 1) * idle) for count in counts]


@frozen
class SharingPoint:
    """Workflows of little load that differ in their transformer alone."""

    workflows: int
    monolithic_gpus: int
    staged_gpus: int

    @property
    def factor(self) -> float:
        """How many times as many GPUs hold the weights where each workflow has its own."""
        return self.monolithic_gpus / self.staged_gpus


def share_encoders(gpu_gb: int, counts: Sequence[int]) -> list[SharingPoint]:
    """GPUs that hold all weights: a process for each workflow, or one shared encoder and decoder for all."""
    points = []
    for count in counts:
        whole = count * math.ceil(_WHOLE_GB / gpu_gb)
        staged = count * math.ceil(_DENOISE_GB / gpu_gb) + math.ceil((_ENCODE_GB + _DECODE_GB) / gpu_gb)
        points.append(SharingPoint(count, whole, staged))
    return points


def _line(parts: Sequence[Part]) -> CapacityModel:
    profiles = [
        StageProfile(part.name, (Timing(part.seconds, devices=part.devices),), devices=part.devices)
        for part in parts
    ]
    return CapacityModel.of(profiles, [WorkflowShape.line(_ALL, [part.name for part in parts])])


# --- published figures -------------------------------------------------------------------------

_I2V_ENCODE, _I2V_DENOISE, _I2V_DECODE = 3.17, 207.7, 2.22
"""Seconds of Wan2.1 14B image to video, 480P, 40 steps, on one H100."""
_WHOLE_GB, _ENCODE_GB, _DENOISE_GB, _DECODE_GB = 48, 13, 32, 0.3
"""The most memory of the same on H100: all together, the encoders, the transformer; the decoder's weights."""
_STEP_ONE, _STEP_EIGHT, _STEP_EIGHT_DISTILLED = 5.18, 0.75, 0.39
"""Seconds of one of its steps: on one H100, on eight, on eight without guidance."""
_QWEN_ENCODE, _QWEN_ENCODE_OFFLOADED = 0.40, 12.89
_QWEN_STEP, _QWEN_STEP_OFFLOADED = 1.88, 2.90
"""Seconds of Qwen-Image-2512 on an RTX 4090: the text encoder, and a step of the 8-step model."""


def _resident() -> Case:
    parts = (
        Part("encode", _I2V_ENCODE),
        Part("denoise", _I2V_DENOISE),
        Part("decode", _I2V_DECODE),
    )
    return Case(
        "all weights resident, one GPU each",
        Part("all", sum(part.seconds for part in parts)),
        parts,
        "Wan2.1 14B image to video, 480P, 81 frames, 40 steps; H100 of 80 GB, which holds all (48 GB)",
        (LIGHTX2V_BLOG,),
    )


def _parallel(name: str, steps: int, step_seconds: float, note: str) -> Case:
    denoise = Part("denoise", steps * step_seconds, 8)
    parts = (Part("encode", _I2V_ENCODE), denoise, Part("decode", _I2V_DECODE))
    return Case(
        name,
        Part("all", sum(part.seconds for part in parts), 8),
        parts,
        f"Wan2.1 14B image to video, 480P, 81 frames, {steps} steps {note}; eight H100 for each instance, of "
        "which seven wait while it encodes and decodes",
        (LIGHTX2V_BLOG, LIGHTX2V_TABLE),
    )


def _offloaded(steps: int, note: str) -> Case:
    return Case(
        f"weights off-loaded to the host, {steps} steps",
        Part("all", _QWEN_ENCODE_OFFLOADED + steps * _QWEN_STEP_OFFLOADED),
        (Part("encode", _QWEN_ENCODE), Part("denoise", steps * _QWEN_STEP)),
        f"Qwen-Image-2512 on RTX 4090 of 24 GB{note}; the text encoder alone fits, with the rest it is "
        "loaded anew for each request; decoding is not published and left out on both sides",
        (LIGHTX2V_BLOG,),
    )


def _offloaded_video(size: str, whole_step: float, step: float) -> Case:
    encode = {"480P": (2.14 + 0.57, 0.20 + 0.28), "720P": (2.14, 0.20)}[size]
    return Case(
        f"weights off-loaded to the host, video {size}",
        Part("all", encode[0] + 40 * whole_step),
        (Part("encode", encode[1]), Part("denoise", 40 * step)),
        f"Wan2.1 14B image to video, {size}, 40 steps, on RTX 4090 of 24 GB; the transformer is off-loaded "
        "on both sides, beside others it is slower; decoding (and for 720P encoding the image) is not "
        "published and left out",
        (LIGHTX2V_BLOG,),
    )


def _small_model() -> Case:
    parts = (Part("encode", 2.3), Part("denoise", 312.8), Part("decode", 7.1))
    return Case(
        "a small model, all resident",
        Part("all", sum(part.seconds for part in parts)),
        parts,
        "Wan2.1 1.3B text to video, 1024x1024, 81 frames, 50 steps; a GPU (H200) for each role, the "
        "transformer off-loaded layer by layer, which the monolithic process is taken to do alike",
        (SGLANG_PAGE,),
    )


def cases() -> tuple[Case, ...]:
    """All comparisons, from the smallest gain to the largest."""
    return (
        _small_model(),
        _resident(),
        _parallel("eight GPUs together, 40 steps", 40, _STEP_EIGHT, "with guidance"),
        _offloaded_video("480P", 24.24, 19.02),
        _offloaded_video("720P", 90.71, 62.80),
        _offloaded(8, ", the 8-step model"),
        _parallel("eight GPUs together, 4 steps", 4, _STEP_EIGHT_DISTILLED, "of a distilled model"),
        _offloaded(4, ", 4 steps at the 8-step model's time of a step"),
        Case(
            "weights off-loaded, the encoder alone",
            Part("all", _QWEN_ENCODE_OFFLOADED),
            (Part("encode", _QWEN_ENCODE),),
            "the text encoder of Qwen-Image-2512 on RTX 4090 of 24 GB; no picture comes of it",
            (LIGHTX2V_BLOG,),
        ),
    )


def parallel_efficiency() -> float:
    """What eight GPUs together make of eight times one, in a step of Wan2.1 14B on H100."""
    return _STEP_ONE / (8 * _STEP_EIGHT)


def resident() -> Case:
    """Wan2.1 14B, all weights resident: the case that workflows take turns with."""
    return _resident()
