"""Profiles: what was measured of a workflow's stages, as a file that planner and simulator read.

JSON, one workflow a file; several size classes may be in one. A file that was written for another
version of the workflow is not added to.
"""

import json
from pathlib import Path
from typing import Any, Final

from attrs import evolve, field, frozen

from onepiece import limits
from onepiece._bounded import text_of
from onepiece._control import header_from_tree, header_to_tree, register
from onepiece.core.capacity import CapacityModel, WorkflowShape
from onepiece.core.service_times import StageProfile
from onepiece.errors import CodecError, ConfigError

_KEY: Final = "onepiece_profile"
_VERSION: Final = 1
FILE_BYTES_MAX: Final = 16 << 20
SECONDS_MIN: Final = 1e-9
SECONDS_MAX: Final = 1e9
BATCH_MAX: Final = 4096
DEVICES_MAX: Final = 4096
MEMORY_BYTES_MAX: Final = 1 << 50
_SPREAD_MAX: Final = 1000.0
"""In means: of n runs it is at most the root of n - 1."""


@register
@frozen
class WorkflowProfile:
    """What was measured of a workflow.

    ``workflow`` is ``module:attribute``; ``measured_on`` names the machine, for people.
    """

    workflow: str
    digest: str
    measured_on: str
    shape: WorkflowShape
    stages: tuple[StageProfile, ...] = field()

    def with_timings_of(self, newer: "WorkflowProfile") -> "WorkflowProfile":
        """This profile with what was measured since, which replaces timings of the same kind.

        Raises:
            ConfigError: It is of another workflow, or another version of it.
        """
        if (self.workflow, self.digest) != (newer.workflow, newer.digest):
            raise ConfigError(
                f"the file holds a profile of {self.workflow} (digest {self.digest}), and this is "
                f"{newer.workflow} (digest {newer.digest}); write to another file, or delete it"
            )
        known = {each.stage: each for each in self.stages}
        return evolve(newer, stages=tuple(_merged(known.get(each.stage), each) for each in newer.stages))


def _merged(old: StageProfile | None, new: StageProfile) -> StageProfile:
    if old is None:
        return new
    timings = {(t.size_class, t.batch, t.devices): t for t in (*old.timings, *new.timings)}
    return evolve(
        new,
        timings=tuple(timings.values()),
        memory_bytes=max(old.memory_bytes, new.memory_bytes),
        output_bytes=max(old.output_bytes, new.output_bytes),
    )


def write_profile(path: Path, profile: WorkflowProfile) -> None:
    """Write the file, whole or not at all; raises ``OSError``."""
    tree = header_to_tree(profile)[1]
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps({_KEY: _VERSION, **tree}, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def read_profile(path: Path) -> WorkflowProfile:
    """Read the file.

    Raises:
        ConfigError: It cannot be read, is no profile, or of a version that is not known here.
    """
    fields = _fields_of(path)
    version = fields.pop(_KEY, None)
    if version != _VERSION:
        raise ConfigError(
            f"{path} is no profile of version {_VERSION} (its field {_KEY!r} is {text_of(version)[:40]}); "
            "write one with `onepiece profile MODULE:WORKFLOW`"
        )
    try:
        profile = header_from_tree([WorkflowProfile.__name__, fields], WorkflowProfile)
        _check_bounds(profile)
    except (CodecError, ConfigError) as error:
        raise ConfigError(f"{path} cannot be used as a profile: {error.message}") from error
    return profile


def _check_bounds(profile: WorkflowProfile) -> None:
    """What a model cannot count with, or would count for ever with, is no measurement."""
    _check("steps", len(profile.shape.steps), 1, limits.STAGES_PER_WORKFLOW_MAX)
    _check("stages", len(profile.stages), 0, limits.STAGES_PER_WORKFLOW_MAX)
    for each in profile.stages:
        check_stage_bounds(each)


def check_stage_bounds(profile: StageProfile) -> None:
    """Raises ``ConfigError`` naming the first number that is beyond what a model can count with."""
    name = f"{text_of(profile.stage)[:80]}: "
    _check(f"{name}concurrency", profile.concurrency, 1, limits.CONCURRENCY_MAX)
    _check(f"{name}devices", profile.devices, 1, DEVICES_MAX)
    _check(f"{name}batch_max", profile.batch_max, 1, BATCH_MAX)
    _check(f"{name}memory_bytes", profile.memory_bytes, 0, MEMORY_BYTES_MAX)
    _check(f"{name}output_bytes", profile.output_bytes, 0, MEMORY_BYTES_MAX)
    _check(f"{name}load_seconds", profile.load_seconds, 0, SECONDS_MAX)
    for timing in profile.timings:
        _check(f"{name}mean_seconds", timing.mean_seconds, SECONDS_MIN, SECONDS_MAX)
        _check(f"{name}spread_seconds", timing.spread_seconds, 0, _SPREAD_MAX * timing.mean_seconds)
        _check(f"{name}batch", timing.batch, 1, BATCH_MAX)
        _check(f"{name}devices", timing.devices, 1, DEVICES_MAX)


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {text_of(value)[:40]}, which is not between {low:g} and {high:g}")


def model_of(profiles: tuple[WorkflowProfile, ...]) -> CapacityModel:
    """The capacity model of these workflows; a stage that several share must have been measured alike.

    Raises:
        ConfigError: Two profiles are of one workflow, or say different things of one stage.
    """
    stages: dict[str, StageProfile] = {}
    shapes: dict[str, WorkflowShape] = {}
    for profile in profiles:
        if profile.shape.name in shapes:
            raise ConfigError(
                f"two profiles are of the workflow {profile.shape.name!r}; give one, and add size classes "
                "to it with `onepiece profile`"
            )
        shapes[profile.shape.name] = profile.shape
        for stage in profile.stages:
            known = stages.setdefault(stage.stage, stage)
            if {t.size_class for t in known.timings} & {t.size_class for t in stage.timings}:
                continue  # measured twice: the first one counts
            stages[stage.stage] = _merged(known, stage)
    return CapacityModel(stages, shapes)


def _fields_of(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX} bytes; it is no profile")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the profile {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON, and no profile: {text_of(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__} where a profile is an object")
    return found
