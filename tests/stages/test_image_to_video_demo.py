"""The demo: what it shows, and that nothing of it outlives it, however it ends."""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path

import pytest
from rich.console import Console

from onepiece.requests import EventKind, RequestEvent
from stages._diffusers import Decoder, Denoiser, ImageEncoder, LatentEncoder, TextEncoder
from stages._video import read_image, read_mp4, write_mp4
from stages._wan import SHIPPED_MODEL, WanModel
from stages.demo.__main__ import PROMPT
from stages.demo.cluster import ClusterFailed, open_cluster
from stages.demo.holdings import Holdings, group_members
from stages.demo.view import RequestView
from tests.runtime.rig import children, is_alive

STAGES = ("encode_text", "denoise", "decode")
LIMIT_SECONDS = 120


def event(kind: EventKind, at: float, stage: str | None = None, **detail: object) -> RequestEvent:
    """An event as the client gives it."""
    return RequestEvent("uid", int(at * 10), kind, at, stage, "worker-1" if stage else None, detail)


def shown(renderable: object) -> str:
    """What a person reads on a terminal of 80 columns."""
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines_of(renderable: object) -> dict[str, str]:
    """The lines by their first word."""
    return {line.split()[0]: line for line in shown(renderable).splitlines() if line.strip()}


def test_the_view_follows_a_stage() -> None:
    """From waiting over each step to finished, with an estimate of what is left."""
    view = RequestView.of(STAGES)
    assert "waiting" in lines_of(view.progress(0.0))["denoise"]
    view.take_in(event(EventKind.ACCEPTED, 0.0))
    view.take_in(event(EventKind.QUEUED, 1.0, "denoise"))
    assert "queued" in lines_of(view.progress(1.0))["denoise"]
    view.take_in(event(EventKind.STAGE_STARTED, 2.0, "denoise"))
    view.take_in(event(EventKind.PROGRESS, 4.0, "denoise", step=5, total=20))
    line = lines_of(view.progress(5.0))["denoise"]
    assert "running" in line
    assert "step 5 of 20" in line
    # Five steps took two seconds, so fifteen take six, of which one is over.
    assert "about 5.0 s left" in line
    view.take_in(event(EventKind.STAGE_FINISHED, 10.0, "denoise", compute_seconds=7.5))
    line = lines_of(view.progress(11.0))["denoise"]
    assert "finished" in line
    assert "step 20 of 20" in line
    assert "left" not in line


def test_the_summary_says_where_the_time_went() -> None:
    """One line a stage with its node, times and bytes, and the whole; on 80 columns nothing is cut."""
    view = RequestView.of(STAGES)
    view.take_in(event(EventKind.ACCEPTED, 1.0))
    view.take_in(event(EventKind.STAGE_STARTED, 1.5, "denoise"))
    took = {
        "waited_seconds": 0.25,
        "received_bytes": 40_000,
        "transfer_seconds": 0.125,
        "compute_seconds": 2.0,
        "sent_bytes": 300,
    }
    view.take_in(event(EventKind.STAGE_FINISHED, 3.5, "denoise", **took))
    view.take_in(event(EventKind.FINISHED, 4.0))
    lines = lines_of(view.summary())
    assert " ".join(lines["denoise"].split()) == "denoise worker-1 0.250 s 39.1 KiB 0.125 s 2.000 s 300 B"
    assert " ".join(lines["end"].split()) == "end to end 3.000 s"
    assert "…" not in shown(view.summary())


def test_the_view_shows_what_failed() -> None:
    """A stage that ran when the request failed is not shown as running for ever."""
    view = RequestView.of(STAGES)
    view.take_in(event(EventKind.STAGE_STARTED, 1.0, "denoise"))
    view.take_in(event(EventKind.FAILED, 2.0, error="StageFailed"))
    lines = lines_of(view.progress(3.0))
    assert "failed" in lines["denoise"]
    assert "waiting" in lines["decode"]


def test_the_view_passes_over_stages_it_does_not_know() -> None:
    """A newer proxy may say more than this view knows."""
    view = RequestView.of(STAGES)
    view.take_in(event(EventKind.STAGE_STARTED, 1.0, "upscale"))
    assert set(view.stages) == set(STAGES)


def test_holdings_see_a_socket_and_its_end() -> None:
    """A listening socket of a process is found, and is left until it is closed."""
    with socket.create_server(("127.0.0.1", 0)):
        before = Holdings.of([os.getpid()])
        assert "a tcp socket" in before.left()
    gone = Holdings(sockets=before.sockets - Holdings.of([os.getpid()]).sockets)
    assert gone.sockets
    assert gone.left() == []


def test_holdings_see_shared_memory_and_its_end() -> None:
    """A mapped file in shared memory is found, and is left until it is removed."""
    memory = shared_memory.SharedMemory(create=True, size=4096)
    path = f"/dev/shm/{memory.name}"
    holdings = Holdings.of([os.getpid()])
    try:
        assert path in holdings.left()
    finally:
        memory.close()
        memory.unlink()
    assert path not in holdings.left()


def test_holdings_of_nobody_are_empty() -> None:
    """A process that is gone holds nothing, and asking for it is no error."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert Holdings.of([process.pid]) == Holdings()


def test_group_members_are_the_running_ones() -> None:
    """A process is a member of its group until it ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    )
    assert group_members(process.pid) == [process.pid]
    process.communicate(b"\n")
    assert group_members(process.pid) == []


@pytest.mark.acceptance
async def test_a_node_that_ends_is_told_with_its_log(tmp_path: Path) -> None:
    """Whoever runs the set learns at once which node ended and why, and the rest is stopped."""
    groups: list[int] = []

    async def run() -> None:
        async with open_cluster(tmp_path) as cluster:
            groups.append(cluster._process.pid)
            cluster._start("bad", ["--roles", "nonsense"])
            await cluster._until(lambda: None, LIMIT_SECONDS, "the failure")

    with pytest.raises(ClusterFailed, match=r"node bad ended with status 2(.|\n)*nonsense"):
        await run()
    assert group_members(groups[0]) == []


@pytest.mark.acceptance
async def test_the_body_fails_with_its_own_error(tmp_path: Path) -> None:
    """What goes wrong in the body comes out as itself, no group, and everything is stopped."""
    with pytest.raises(ZeroDivisionError):
        async with open_cluster(tmp_path):
            raise ZeroDivisionError
    async with open_cluster(tmp_path) as cluster:
        assert await cluster.stop() == []
        assert await cluster.stop() == []


class Demo:
    """A running demo, and everything it started."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "out"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        shutil.rmtree(
            self.output / "logs", ignore_errors=True
        )  # of an earlier run, which ``has_log`` would see
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stages.demo", "--output", str(self.output)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": str(self.temporary), "HF_HUB_OFFLINE": "1", "COLUMNS": "120"},
        )
        self.seen: set[int] = set()

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Until it holds; fails if the demo ends before."""
        limit = time.monotonic() + LIMIT_SECONDS
        while not what():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < limit
            self.seen |= descendants(self.process.pid)
            time.sleep(0.02)
        self.seen |= descendants(self.process.pid)

    def finish(self) -> tuple[int, str]:
        """Its exit status and what it printed."""
        printed, _ = self.process.communicate(timeout=LIMIT_SECONDS)
        return self.process.returncode, printed

    def has_log(self, name: str, text: str = "") -> bool:
        """Whether a node has written this into its log."""
        path = self.output / "logs" / f"{name}.log"
        return path.exists() and text in path.read_text(errors="replace")

    def assert_nothing_left(self) -> None:
        """No process that it started runs, and its temporary folder is empty, soon if not at once."""
        limit = time.monotonic() + LIMIT_SECONDS
        while any(map(is_alive, self.seen)) or list(self.temporary.iterdir()):
            assert time.monotonic() < limit, (self.seen, list(self.temporary.iterdir()))
            time.sleep(0.02)


def descendants(process_id: int) -> set[int]:
    """All processes below this one."""
    below = children(process_id)
    return below.union(*map(descendants, below))


@pytest.mark.acceptance
@pytest.mark.diffusion
@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_SECONDS)
def test_the_demo_makes_a_video_twice(tmp_path: Path) -> None:
    """A clip, contact sheet and table over five processes, nothing left; again the same bytes (fault 117).

    The bytes are those that the same stages make within one process.
    """
    pytest.importorskip("diffusers", reason="needs the diffusion extra")
    clips = set[bytes]()
    for _ in range(2):
        demo = Demo(tmp_path)
        demo.wait_for(lambda demo=demo: demo.has_log("worker-4", "node_started"))  # type: ignore[misc]  # bound now
        status, printed = demo.finish()
        assert status == 0, printed
        demo.assert_nothing_left()
        assert len(demo.seen) == 6  # the fork server and five nodes
        clip = (demo.output / "clip.mp4").read_bytes()
        assert read_mp4(clip).shape == (9, 64, 64, 3)
        assert (demo.output / "frames.png").read_bytes().startswith(b"\x89PNG")
        clips.add(clip)
        for stage in ("encode_text", "encode_image", "encode_latents", "denoise", "decode"):
            assert re.search(rf"{stage} +worker-\d .* s ", printed), printed
        assert re.search(r"end to end +\d+\.\d+ s", printed), printed
        assert "no process, socket or shared memory is left" in printed
    assert clips == {made_in_one_process(steps=20)}


def made_in_one_process(steps: int) -> bytes:
    """The demo's clip, without nodes, rings and forks."""
    model, device = WanModel.from_environment({}), "cpu"
    image = read_image((SHIPPED_MODEL / "example.png").read_bytes())
    prompt, negative_prompt = TextEncoder.load(model, device).encode(PROMPT, "", guided=False)
    seen = ImageEncoder.load(model, device).encode(image)
    noise, condition = LatentEncoder.load(model, device).encode(
        image, height=model.height, width=model.width, num_frames=model.num_frames, seed=0
    )
    latents = Denoiser.load(model, device).denoise(
        noise, condition, prompt, negative_prompt, seen, steps=steps, guidance=1.0, on_step=lambda _: None
    )
    return write_mp4(Decoder.load(model, device).decode(latents), model.frames_per_second)


@pytest.mark.acceptance
@pytest.mark.diffusion
@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_SECONDS)
@pytest.mark.parametrize("moment", ["importing", "loading"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "SIGKILL"])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    """Neither while libraries are imported nor while stages load, neither asked nor killed."""
    pytest.importorskip("diffusers", reason="needs the diffusion extra")
    demo = Demo(tmp_path)
    if moment == "importing":
        demo.wait_for(lambda: demo.has_log("seed", "node_started"))
    else:
        demo.wait_for(lambda: demo.has_log("worker-4", "node_started"))
    demo.process.send_signal(number)
    status, printed = demo.finish()
    demo.assert_nothing_left()
    assert len(demo.seen) == (2 if moment == "importing" else 6)
    if number is signal.SIGINT:
        assert status == 130, printed
        assert "interrupted; all nodes are stopped" in printed
        assert "Traceback" not in printed


def test_wrong_input_ends_the_demo_before_it_starts(tmp_path: Path) -> None:
    """A missing image is one line and status 1, no traceback and no node."""
    command = [
        sys.executable,
        "-m",
        "stages.demo",
        "--output",
        str(tmp_path),
        "--image",
        str(tmp_path / "none.png"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
    assert result.returncode == 1
    assert "none.png" in result.stdout.replace("\n", "")
    assert "Traceback" not in result.stdout + result.stderr


def test_holdings_can_be_told(tmp_path: Path) -> None:
    """What is left is said in words that JSON and a terminal can show."""
    assert json.dumps(Holdings(shared_memory=frozenset({str(tmp_path)})).left()) == json.dumps(
        [str(tmp_path)]
    )
