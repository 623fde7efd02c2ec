"""What passes between a node and a helper process: values, progress, surroundings, log lines."""

import importlib
import json
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from onepiece.errors import SchemaMismatch
from onepiece.requests import EventKind
from onepiece.runtime.isolated_channel import IsolatedStart
from onepiece.runtime.isolated_child import find_stage
from onepiece.runtime.isolated_start import child_device, child_environment
from tests.runtime.isolated_stages import (
    Parcel,
    break_down,
    breakable,
    describe,
    double,
    linger,
    make_tensors,
    traced,
    watched,
)
from tests.runtime.rig import NODE, descriptors, rig, stage_task_of


async def test_large_tensors_arrive_bit_equal() -> None:
    """Of any size, in the packet or in shared memory; and nothing of it stays open."""
    random = np.random.default_rng(1)
    async with rig(make_tensors) as rigged:
        before = descriptors()
        for count in (0, 1, 1000, 20_000, 100_000, 5_000_000):
            tensors = {
                "floats": random.random(count, np.float32),
                "bits": random.integers(0, 2, (2, count)).astype(bool),
                "number": np.array(count),
                "turned": random.random((3, 2, count // 8)).transpose(2, 0, 1),
            }
            received = await rigged.value(tensors=tensors)
            assert list(received) == list(tensors)
            for name, tensor in tensors.items():
                came = np.asarray(received[name])  # of torch's if this process has imported it
                assert (came.dtype, came.shape) == (tensor.dtype, tensor.shape)
                assert came.tobytes() == tensor.tobytes()
        assert descriptors() == before


async def test_records_tuples_and_long_bytes_arrive_as_they_were() -> None:
    """The helper process imports their classes with the stage."""
    async with rig(double) as rigged:
        parcel = Parcel("a" * 10_000, np.arange(300_000), (np.ones((2, 2), np.float16), bytes(2_000_000)))
        came = await rigged.value(parcel=parcel, times=3)
        assert isinstance(came, Parcel)
        assert came.name == f"{parcel.name}!"
        assert np.array_equal(np.asarray(came.pixels), parcel.pixels * 3)
        assert isinstance(came.extra, tuple)
        assert np.array_equal(np.asarray(came.extra[0]), parcel.extra[0])
        assert came.extra[1] == parcel.extra[1]


async def test_the_inputs_memory_is_given_back_before_the_stage_runs() -> None:
    """As soon as they are copied, not when the stage is done: the ring's room is for others."""
    released: list[int] = []
    async with rig(linger) as rigged:
        large = "report " + "x" * 500_000
        stage_task = stage_task_of(
            {"how": large, "seconds": 0.0}, release=lambda: released.append(len(rigged.progress))
        )
        outcome = await rigged.execute(stage_task, rigged.context(rigged.state))
        assert outcome.shipment == large  # the rig writes zeros over what was given back
        assert released == [0]  # before the stage reported anything


async def test_many_calls_at_once_get_their_own_answers() -> None:
    """As many as the stage's concurrency, and more; large and small between each other."""
    async with rig(linger) as rigged:
        words = [f"{number} " + "x" * (number % 3) * 100_000 for number in range(24)]
        calls = [rigged.start(how=word, seconds=0.0) for word in words]
        assert [(await call.task).shipment for call in calls] == words


async def test_progress_comes_in_order_and_the_newest_wins() -> None:
    """Steps never go back, the last one always comes, previews too; and not each of many is sent."""
    async with rig(watched) as rigged:
        assert await rigged.value(steps=2000) == 2000
        steps = rigged.steps
        assert steps == sorted(steps)
        assert steps[-1] == 2000
        assert len(steps) < 1000
        details = [detail for kind, detail in rigged.progress if kind is EventKind.PREVIEW]
        assert details[-1] == {"data": bytes([2000 % 256]) * 200_000, "content_type": "image/raw"}
        assert all(detail["total"] == 2000 for kind, detail in rigged.progress if kind is EventKind.PROGRESS)


async def test_the_process_knows_what_a_stage_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context is as in the node, and so is the environment."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    async with rig(describe) as rigged:
        context = rigged.context(rigged.state, deadline_at=time.time() + 1000, attempt=2)
        outcome = await rigged.execute(stage_task_of({}), context)
        assert outcome.shipment == {
            "device": "cpu",
            "node": NODE,
            "uid": "u",
            "attempt": "2",
            "stage": "stage",
            "deadline": "True",
            "thread": "True",
            "CUDA_VISIBLE_DEVICES": "4,5",
            "OMP_NUM_THREADS": "1",
        }


def test_a_process_sees_its_own_gpu_alone() -> None:
    """Whatever the node itself may see; a processor's environment is left as it is."""
    for device, visible, wanted in (
        ("cuda:0", None, "0"),
        ("cuda:3", None, "3"),
        ("cuda:1", "4,5", "5"),
        ("cuda:1", "GPU-a, GPU-b", "GPU-b"),
        ("cpu:0", "4,5", "4,5"),
    ):
        environment = {"PATH": "/bin"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
        assert child_environment(device, environment) == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": wanted}
    assert child_environment("cpu:0", {}) == {}
    assert child_device("cuda:3") == "cuda:0"
    assert child_device("cpu:1") == "cpu:1"


async def test_log_lines_look_like_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the node's format, at its level, with the request's fields, on its standard error."""
    monkeypatch.setenv("ONEPIECE_TEST_TRACES", str(tmp_path / "traces"))
    monkeypatch.setattr("onepiece.log._chosen", ("json", "info"))  # of a node that was told --log-json
    async with rig(traced) as rigged:
        await rigged.value(word="hello")
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if '"loaded_here"' in line]
    assert len(lines) == 1
    assert (lines[0]["level"], lines[0]["node"], lines[0]["fault"]) == ("info", NODE, "")


def start_of(key: str, signature: str) -> IsolatedStart:
    """What a node sends for the stage of this key."""
    return IsolatedStart(key, signature, "cpu:0", NODE, (), "text", "info")


def test_a_stage_is_found_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the top of its module, or in a workflow there."""
    assert find_stage(start_of(break_down.key, break_down.spec.signature)) is break_down
    in_workflow = types.ModuleType("holds_a_workflow")
    monkeypatch.setitem(sys.modules, "holds_a_workflow", in_workflow)
    moved = evolve(break_down, key="holds_a_workflow:hidden")
    in_workflow.breakable = evolve(breakable, stages={moved.key: moved})  # type: ignore[attr-defined]  # the same
    assert find_stage(start_of(moved.key, moved.spec.signature)) is moved


def test_a_stage_that_is_not_found_is_named() -> None:
    """With what to do: nothing is guessed."""
    with pytest.raises(ImportError, match=r"has no stage 'stages\.echo:nothing' at its top"):
        find_stage(start_of("stages.echo:nothing", "nothing() -> int"))
    with pytest.raises(ModuleNotFoundError):
        find_stage(start_of("stages.nowhere:nothing", "nothing() -> int"))


def test_a_file_that_has_changed_is_refused() -> None:
    """The node and its helper process must mean the same by the stage's name."""
    with pytest.raises(SchemaMismatch, match="restart the node"):
        find_stage(start_of(break_down.key, "break_down(fault: str) -> int"))


async def test_an_input_that_has_no_form_on_the_wire_is_an_error() -> None:
    """A constant of the workflow that cannot travel fails the stage task, nothing else."""
    async with rig(describe) as rigged:
        stage_task = stage_task_of({})
        stage_task.constants = {"impossible": object()}
        outcome = await rigged.execute(stage_task, rigged.context(rigged.state))
        assert outcome.error is not None
        assert "impossible: a builtins.object has no form on the wire" in outcome.error.message
        assert not outcome.is_dirty
        assert (await rigged.run()).error is None


@pytest.mark.diffusion
async def test_torch_tensors_pass() -> None:
    """With a dtype that numpy does not have, bit by bit, and as a view."""
    torch = pytest.importorskip("torch", reason="needs the extra 'diffusion' (torch)")
    halve = importlib.import_module("tests.runtime.isolated_torch_stages").halve
    latents = torch.linspace(-1, 1, 400_000).reshape(2, 200_000).to(torch.bfloat16)
    async with rig(halve) as rigged:
        halved = await rigged.value(latents=latents)
        assert halved.dtype == torch.bfloat16
        assert torch.equal(halved, (latents / 2).T)
