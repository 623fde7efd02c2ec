"""``onepiece profile`` and ``onepiece plan``: what is measured comes into a file, and plans out of it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from onepiece.cli import exits
from onepiece.cli.main import main
from onepiece.core.capacity import WorkflowShape
from onepiece.core.inventory import Device, DeviceKind
from onepiece.core.service_times import Mode, StageProfile, Timing
from onepiece.profiles import WorkflowProfile, model_of, read_profile, write_profile
from onepiece.runtime.profiling import ProfileOptions, profile_workflow
from tests.core.capacity_parts import GIB, make_stage
from tests.runtime.hoarding_stages import LOADED_BYTES, WORKING_BYTES, hoard_together

_PIPELINE = WorkflowProfile(
    "module:video",
    "digest",
    "a test",
    WorkflowShape.line("video", ["m:encode", "m:draw"]),
    (make_stage("m:encode", 4.0, spread=0.4, gib=12), make_stage("m:draw", 12.0, spread=1.0, gib=33)),
)


def _written(directory: Path, profile: WorkflowProfile = _PIPELINE) -> str:
    path = directory / f"{profile.shape.name}.json"
    write_profile(path, profile)
    return str(path)


def _failed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == exits.USAGE
    return capsys.readouterr().err


def _planned(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["plan", "--json", *argv]) == exits.OK
    return json.loads(capsys.readouterr().out)


def test_a_profile_measures_each_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stages that take known times are measured so, with what they send, and the file reads back."""
    path = tmp_path / "profile.json"
    argv = ["profile", "stages.synthetic:diamond", "-o", str(path), "--samples", "2", "--warm-up", "0"]
    inputs = ["-i", "seconds=[0.01, 0.05, 0.01, 0.01]", "-i", "payload_bytes=[5000, 100, 200, 300]"]
    assert main([*argv, *inputs, "--device", "cpu:0"]) == exits.OK
    assert "stages.synthetic:left" in capsys.readouterr().out
    profile = read_profile(path)
    assert profile.workflow == "stages.synthetic:diamond"
    stages = {each.stage.rpartition(":")[2]: each for each in profile.stages}
    assert [step.name for step in profile.shape.steps] == list(stages)
    (timing,) = stages["left"].timings
    assert timing.samples == 2
    assert timing.mean_seconds >= 0.05
    assert stages["split"].output_bytes >= 2 * 5000  # to both branches
    assert all(stage.load_seconds > 0 for stage in stages.values())


@pytest.mark.parametrize("name", ["y" * 65, "\x1b[31m", "gr\u00f6\u00dfe"])
def test_a_size_class_that_no_request_can_name_is_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """It is refused as it would be in a request's header."""
    path = tmp_path / "profile.json"
    argv = ["profile", "stages.echo:echo", "-i", "text=a", "-o", str(path), "--size-class", name]
    assert main(argv) == exits.REJECTED
    assert "give up to 64 printable ASCII characters" in capsys.readouterr().err
    assert not path.exists()


def test_a_profile_keeps_other_size_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second measurement adds its size class, and replaces its own if it is made again."""
    path = tmp_path / "profile.json"
    argv = ["profile", "stages.synthetic:chain", "-o", str(path), "--samples", "1", "--warm-up", "0"]
    for size_class in ("small", "large", "small"):
        assert main([*argv, "--size-class", size_class]) == exits.OK
    assert all(each.size_classes == ("large", "small") for each in read_profile(path).stages)
    assert "holds a profile of" in _failed(capsys, "profile", "stages.synthetic:noop", "-o", str(path))


def test_a_stage_in_a_process_of_its_own_is_measured_there(tmp_path: Path) -> None:
    """Its memory is that of the process, tens of megabytes, though the stage itself holds nothing."""
    path = tmp_path / "profile.json"
    argv = ["profile", "tests.cli.profiled:apart", "-o", str(path), "--samples", "1", "--warm-up", "0"]
    assert main(argv) == exits.OK
    (stage,) = read_profile(path).stages
    assert stage.memory_bytes > 10 << 20


def test_a_stage_on_several_devices_is_measured_on_as_many(tmp_path: Path) -> None:
    """In a helper process on each, which work together; the timing says on how many, and plans go by it."""
    path = tmp_path / "profile.json"
    argv = ["profile", "tests.cli.profiled:wide", "-o", str(path), "--samples", "2", "--device", "cpu:0"]
    assert main(argv) == exits.OK
    (stage,) = read_profile(path).stages
    assert (stage.devices, stage.mode) == (2, Mode.COLLABORATION)
    assert [(timing.devices, timing.samples) for timing in stage.timings] == [(2, 2)]
    assert stage.memory_bytes == GIB, "it wants a GPU, and what it takes of a processor says little"
    assert stage.load_seconds > 0


async def test_what_a_stage_on_several_devices_takes_is_that_of_its_largest_rank() -> None:
    """Loaded and at work, of a rank's own process; at home on processors it counts."""
    device = Device("cpu:0", DeviceKind.CPU, 1 << 40)
    profile = await profile_workflow(
        hoard_together, {"runs": 1}, device, ProfileOptions(samples=1, warm_up=0)
    )
    (stage,) = profile.stages
    both = LOADED_BYTES + WORKING_BYTES
    assert 0.9 * both < stage.memory_bytes < 1.5 * both


def test_what_cannot_be_profiled_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong names, inputs, numbers, too few devices, and stages that do not load or fail."""
    path = str(tmp_path / "profile.json")
    assert "has no workflow 'nothing'" in _failed(capsys, "profile", "stages.echo:nothing", "-o", path)
    told = _failed(capsys, "profile", "stages.synthetic:chain", "-o", path, "--samples", "0")
    assert "--samples is a number from 1" in told
    argv = ("profile", "tests.cli.profiled:wide", "-o", path, "--device", "cuda:97=8GiB")
    assert "works on 2 devices together, and there are 0 from cuda:97 on" in _failed(capsys, *argv)
    told = _failed(capsys, "profile", "tests.cli.profiled:unloadable", "-o", path)
    assert "stage tests.cli.profiled:heavy could not be loaded: ValueError: no weights here" in told
    assert main(["profile", "stages.synthetic:chain", "-o", path, "-i", "failure=raise"]) == exits.FAILED
    assert not Path(path).exists()


def test_a_plan_for_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Instances of each stage, and the monolithic alternative, as the model has them."""
    found = _planned(
        capsys, "--profile", _written(tmp_path), "--rate", "1", "--utilisation", "0.8", "--price", "3.6"
    )
    staged = found["staged"]
    assert {key: stage["instances"] for key, stage in staged["stages"].items()} == {
        "m:encode": 5,
        "m:draw": 15,
    }
    assert staged["devices"] == 20
    assert staged["cost_of_1000_requests"] == pytest.approx(20.0)
    (latency,) = staged["latencies"]
    assert latency["unloaded_seconds"] == 16
    assert latency["mean_seconds"] < latency["p95_seconds"]
    assert found["monolithic"]["stages"]["all of video"]["memory_bytes"] == 45 * GIB


def test_a_plan_for_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a rate it is the highest one; with one that needs more, it says how many."""
    path = _written(tmp_path)
    found = _planned(capsys, "--profile", path, "--gpus", "8", "--utilisation", "1")
    assert found["staged"]["rate"] == pytest.approx(0.5)
    found = _planned(capsys, "--profile", path, "--gpus", "8", "--rate", "1", "--utilisation", "0.8")
    assert found["staged"]["rate"] == pytest.approx(0.4)
    assert found["staged"]["limit"] == "8 GPUs: 1 requests/s would need 20"


def test_what_if_stands_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each change gets a column; one that is out of reach says why there, and the others stay."""
    changes = ["draw.seconds=x0.5", "rate=x2", "p95=1", "gpus=4,p95=30"]
    argv = ["--profile", _written(tmp_path), "--rate", "1", "--utilisation", "0.8"]
    found = _planned(capsys, *argv, *(part for change in changes for part in ("--what-if", change)))
    assert found["draw.seconds=x0.5"]["devices"] == 13
    assert found["rate=x2"]["devices"] == 40
    assert "out of reach" in found["p95=1"]["error"]
    assert found["gpus=4,p95=30"]["limit"].startswith("4 GPUs")
    assert main(["plan", *argv, "--what-if", "p95=1", "--gpu-memory", "40"]) == exits.OK
    shown = capsys.readouterr().out
    assert "p95=1: a P95 of 1.0 s is out of reach" in shown
    assert "monolithic: all of video needs 45.0 GiB, which a GPU of 40 GiB does not have" in shown


def test_changes_of_a_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More devices for each instance, more workers, and batches, as far as they were measured."""
    timings = (Timing(12.0), Timing(4.0, devices=4), Timing(15.0, batch=4))
    draw = StageProfile("m:draw", timings)
    path = _written(tmp_path, evolve(_PIPELINE, stages=(_PIPELINE.stages[0], draw)))
    changes = ["draw.devices=4", "draw.concurrency=3", "draw.batch=4", "draw.devices=2"]
    argv = ["--profile", path, "--rate", "1", "--utilisation", "1"]
    found = _planned(capsys, *argv, *(part for change in changes for part in ("--what-if", change)))
    counts = [found[change]["stages"]["m:draw"]["instances"] for change in changes[:3]]
    assert counts == [4, 4, 4]
    assert found["draw.devices=4"]["devices"] == 20
    assert "measured on 1 or 4 devices, not on 2" in found["draw.devices=2"]["error"]


def test_shared_stages_are_planned_once(tmp_path: Path) -> None:
    """Two profiles with a stage in common give one model; size classes of both count."""
    other = WorkflowProfile(
        "module:picture",
        "digest",
        "a test",
        WorkflowShape.line("picture", ["m:encode"]),
        (StageProfile("m:encode", (Timing(1.0, size_class="small"),)),),
    )
    model = model_of((_PIPELINE, other))
    assert model.stages["m:encode"].size_classes == ("", "small")
    assert sorted(model.stages) == ["m:draw", "m:encode"]


def test_wrong_questions_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each error names what is wrong, and what to write."""
    path = _written(tmp_path)
    plan = ("plan", "--profile", path)
    assert "give --rate for the GPUs that it needs, or --gpus" in _failed(capsys, *plan)
    assert "'fast' is no rate; give a number" in _failed(capsys, *plan, "--rate", "fast")
    assert "no workflow 'x' in the model; there are: video" in _failed(capsys, *plan, "--rate", "x=1")
    assert "no timing for the size class '4k'" in _failed(capsys, *plan, "--rate", "video/4k=1")
    assert "--utilisation is 2; give a number above 0.001 and at most 1" in _failed(
        capsys, *plan, "--rate", "1", "--utilisation", "2"
    )
    for change in ("rate=2", "draw.seconds=5", "rate=x1e300", "draw.seconds=x1e-300", "p95=nan"):
        assert "give a " in _failed(capsys, *plan, "--rate", "1", "--what-if", change)
    for change in ("rate=x1e6,rate=x1e6", "draw.concurrency=999999999", "gpus=999999999"):
        assert "video" not in _failed(capsys, *plan, "--rate", "1", "--what-if", change)
    for rate in ("nan", "1e-320", "1e308"):
        assert "is no rate" in _failed(capsys, *plan, "--rate", rate)
    assert "stage m:encode would need 4e+06 workers" in _failed(
        capsys, *plan, "--rate", "1e6", "--utilisation", "1"
    )
    assert "not both" in _failed(capsys, *plan, "--rate", "1", "--mix", "1")
    assert "1 GPUs are fewer than" in _failed(capsys, *plan, "--gpus", "1")
    for change in ("draw", "colour=3", "nobody.seconds=x2", "draw.colour=3", "gpus=-1", "rate=xfast"):
        assert "--what-if" in _failed(capsys, *plan, "--rate", "1", "--what-if", change)
    two = _written(tmp_path, evolve(_PIPELINE, shape=WorkflowShape.line("other", ["m:draw"])))
    assert "which workflow? There are: 'other', 'video'" in _failed(
        capsys, *plan, "--profile", two, "--rate", "1"
    )
    assert "two profiles are of the workflow 'video'" in _failed(
        capsys, *plan, "--profile", path, "--rate", "1"
    )


@pytest.mark.parametrize(
    "option", [("--price", "nan"), ("--p95", "inf"), ("--arrivals", "1e300"), ("--gpu-memory", "-1")]
)
def test_options_without_a_sense_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    """Neither a cost of nan nor a plan for a GPU of less than nothing is printed."""
    with pytest.raises(SystemExit):
        main(["plan", "--profile", _written(tmp_path), "--rate", "1", *option])
    assert f"argument {option[0]}: '{option[1]}' is no number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is no JSON, and no profile"),
        ("[]", "holds a list where a profile is an object"),
        ("{}", "is no profile of version 1 (its field 'onepiece_profile' is None)"),
        ('{"onepiece_profile": 1}', "cannot be used as a profile: WorkflowProfile: the field"),
    ],
)
def test_a_broken_profile_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    """What is wrong with the file is said, and which file it is."""
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_text(content)
    told = _failed(capsys, "plan", "--profile", str(path), "--rate", "1")
    assert message in told
    assert "broken.json" in told


def test_a_field_of_the_wrong_kind_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A number that is none, and a stage without timings, are found when the file is read."""
    path = tmp_path / "video.json"
    write_profile(path, _PIPELINE)
    good = json.loads(path.read_text())
    for change, message in (
        ({"load_seconds": "long"}, "a str where float is wanted"),
        ({"load_seconds": -1.0}, "'load_seconds' must be >= 0"),
        ({"timings": []}, "has no timing; profile its workflow"),
        ({"colour": 1}, "unknown field 'colour'"),
        ({"load_seconds": 10**400}, "a whole number beyond all floats"),
        ({"load_seconds": math.inf}, "load_seconds is inf, which is not between 0 and 1e+09"),
        ({"timings": [{"mean_seconds": 1e300}]}, "mean_seconds is 1e+300"),
        ({"timings": [{"mean_seconds": 1e-300}]}, "mean_seconds is 1e-300"),
        ({"timings": [{"mean_seconds": 1.0, "spread_seconds": 1e200}]}, "spread_seconds is 1e+200"),
        ({"timings": [{"mean_seconds": 1.0, "batch": 10**9}]}, "batch is 1000000000"),
        ({"concurrency": 10**9}, "concurrency is 1000000000"),
    ):
        first, *rest = good["stages"]
        path.write_text(json.dumps({**good, "stages": [{**first, **change}, *rest]}))
        assert message in _failed(capsys, "plan", "--profile", str(path), "--rate", "1")
