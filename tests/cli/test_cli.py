"""The command line against a real HTTP server: output, files, exit codes."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from anyio import to_thread
from attrs import define

import onepiece
from onepiece import StageContext, Tensor, stage, workflow
from onepiece.cli import exits
from onepiece.cli.main import BENCHES, main
from onepiece.errors import (
    DeadlineExceeded,
    NodeLost,
    NotReady,
    OnePieceError,
    Overloaded,
    RequestCancelled,
    StageFailed,
    StoreFull,
)
from onepiece.node.frontend import NodeView
from onepiece.node.http_testing import FakeFrontend
from onepiece.node.proxy import build_app, serve
from stages.echo import echo

ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(Path(onepiece.__path__[0]).parent), os.environ.get("PYTHONPATH", "")])
}


@stage
async def render(
    ctx: StageContext[None], prompt: str, image: bytes, steps: int, sizes: list[int], latents: Tensor | None
) -> bytes:
    """Never runs here."""
    return image


@workflow
def movie(
    prompt: str,
    image: bytes,
    steps: int = 4,
    sizes: list[int] = [1],  # noqa: B006 - a workflow's defaults are constants of its graph
    latents: Tensor | None = None,
) -> bytes:
    """Inputs of several sorts."""
    return render(prompt, image, steps, sizes, latents)


@define
class Set:
    """A served proxy, and what the command line said to it."""

    frontend: FakeFrontend
    url: str
    capture: pytest.CaptureFixture[str]
    out: str = ""
    err: str = ""

    async def run(self, *argv: str) -> int:
        """Run a command with this server; its exit code."""
        code = await to_thread.run_sync(main, [*argv, "--server", self.url])
        self.out, self.err = self.capture.readouterr()
        return code

    @property
    def only(self) -> str:
        """The UID of the only request."""
        (uid,) = self.frontend.requests_by_uid
        return uid


@asynccontextmanager
async def served(capture: pytest.CaptureFixture[str], answer: Any = None) -> AsyncIterator[Set]:
    """A proxy on a free port."""
    frontend = FakeFrontend([echo, movie], answer)
    async with serve(build_app(frontend), shutdown_seconds=2) as port:
        yield Set(frontend, f"http://127.0.0.1:{port}", capture)


def shout(name: str, inputs: Any) -> str:
    """What the stage of ``echo`` does."""
    return f"{inputs['text'].upper()}!"


async def test_submit_prints_the_result_and_shows_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """The result is all of standard output; what happened is on standard error, one line per event."""
    async with served(capsys, shout) as the:
        assert (
            await the.run("submit", "echo", "--input", "text=ahoy = hi", "--timeout", "9", "--key", "k") == 0
        )
        assert the.out == "AHOY = HI!\n"
        assert re.search(r"^ +0\.\d\ds  accepted ", the.err, re.MULTILINE)
        assert f"finished {the.only}" in the.err
        assert the.frontend.requests_by_uid[the.only].status.key == "k"
        assert the.frontend.requests_by_uid[the.only].is_purged


async def test_the_server_stands_before_or_behind_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    """Both reach it; of two, the one behind the verb wins."""
    async with served(capsys, shout) as the:
        for before, behind in (
            (["--server", the.url], []),
            ([], ["--server", the.url]),
            (["--server", "http://127.0.0.1:9"], ["--server", the.url]),
        ):
            argv = [*before, "submit", "echo", "-i", "text=hi", *behind]
            assert await to_thread.run_sync(main, argv) == 0
            assert capsys.readouterr().out == "HI!\n"


async def test_a_stage_that_raised_is_told_with_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Below what it said stands where: the last frame of its traceback."""
    trace = 'File "a.py", line 3, in run\n  File "my stages.py", line 7, in paint\n    boom()\nE: no'

    def fail(name: str, inputs: Any) -> None:
        raise StageFailed("paint raised E: no", traceback=trace)

    async with served(capsys, fail) as the:
        assert await the.run("submit", "echo", "-i", "text=x") == exits.FAILED
        assert "StageFailed: paint raised E: no\n  raised at my stages.py:7 in paint\n" in the.err


async def test_where_the_result_goes_is_looked_at_first(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A result that could not be written is not asked for."""
    async with served(capsys, shout) as the:
        for output, words in ((tmp_path / "no" / "x", "there is no directory"), (tmp_path, "is a directory")):
            assert await the.run("submit", "echo", "-i", "text=x", "-o", str(output)) == exits.USAGE
            assert words in the.err
            assert await the.run("result", "nobody", "-o", str(output)) == exits.USAGE
        assert not the.frontend.requests_by_uid
        assert await the.run("submit", "echo", "-i", "text=x", "-o", "/dev/null") == exits.OK
        assert await anyio.Path("/dev/null").is_char_device()


@pytest.mark.parametrize("wrong", ["steps=99999999999999999999", "prompt=\udc80", 'sizes=["\\udc80"]'])
async def test_an_input_without_a_form_on_the_wire_is_rejected(
    capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    """It is named, as any wrong input is, with the same exit code."""
    async with served(capsys) as the:
        given = {"prompt": "prompt=x", "image": "image=@/dev/null"} | {wrong.partition("=")[0]: wrong}
        argv = [word for text in given.values() for word in ("-i", text)]
        assert await the.run("submit", "movie", *argv) == exits.REJECTED
        assert f"InvalidInput: input '{wrong.partition('=')[0]}'" in the.err


async def test_inputs_are_read_as_the_signature_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Texts, numbers, JSON, files of bytes, of text and of tensors."""
    (tmp_path / "ship.png").write_bytes(b"\x89PNG\n")
    (tmp_path / "prompt.txt").write_text("größe\n")
    np.save(tmp_path / "latents.npy", np.arange(6).reshape(2, 3))
    async with served(capsys) as the:
        argv = [
            f"--input=prompt=@{tmp_path}/prompt.txt",
            f"--input=image=@{tmp_path}/ship.png",
            "--input=steps=7",
            "--input=sizes=[1, 2]",
            f"--input=latents=@{tmp_path}/latents.npy",
        ]
        assert await the.run("submit", "movie", "--no-wait", *argv) == 0
        assert the.out == f"{the.only}\n"
        inputs = the.frontend.requests_by_uid[the.only].inputs
        assert np.asarray(inputs.pop("latents")).tolist() == [[0, 1, 2], [3, 4, 5]]  # type: ignore[attr-defined]  # a dict
        assert inputs == {"prompt": "größe\n", "image": b"\x89PNG\n", "steps": 7, "sizes": [1, 2]}
        assert await the.run("submit", "echo", "--no-wait", "--input", "text=@@home") == 0
        assert the.frontend.requests_by_uid[the.out.strip()].inputs == {"text": "@home"}


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["--input", "text"], exits.USAGE, "name=text"),
        (["--input", "text=@/nowhere/file"], exits.USAGE, "/nowhere/file"),
        (["--input", "txet=x"], exits.REJECTED, "text: str"),
        (["--input", "text=x", "--input", "text=y"], exits.REJECTED, "twice"),
        (["--timeout", "-1", "--input", "text=x"], exits.REJECTED, "timeout_seconds"),
        ([], exits.REJECTED, "text"),
    ],
)
async def test_wrong_inputs_are_told_by_name(
    capsys: pytest.CaptureFixture[str], argv: Sequence[str], code: int, words: str
) -> None:
    """One line on standard error, nothing on standard output, nothing submitted."""
    async with served(capsys) as the:
        assert await the.run("submit", "echo", *argv) == code
        assert the.err.startswith("onepiece submit: ")
        assert words in the.err
        assert the.err.count("\n") == 1
        assert not the.out
        assert not the.frontend.requests_by_uid


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("steps=many", "int"),
        ("steps=1.5", "int"),
        ("sizes=1,2", "JSON"),
        ("image=text", "file"),
        ("latents=[1]", "Tensor"),
    ],
)
async def test_a_text_that_does_not_fit_is_told(
    capsys: pytest.CaptureFixture[str], argument: str, words: str
) -> None:
    """The type that is wanted is named."""
    async with served(capsys) as the:
        assert await the.run("submit", "movie", "--input", "prompt=p", "--input", argument) == exits.REJECTED
        assert argument.partition("=")[0] in the.err
        assert words in the.err


async def test_a_file_that_is_no_tensor_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing but numbers is read from a .npy file, whatever it claims to hold."""
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    async with served(capsys) as the:
        code = await the.run("submit", "movie", "--input", f"latents=@{tmp_path}/objects.npy")
        assert code == exits.REJECTED
        assert "no .npy file" in the.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StageFailed("denoise raised ValueError"), 1),
        (NodeLost("n2 died"), 1),
        (StoreFull("full"), 1),
        (RequestCancelled("by somebody"), 5),
        (DeadlineExceeded("too late"), 5),
    ],
)
async def test_a_request_that_fails_has_an_exit_code(
    capsys: pytest.CaptureFixture[str], error: OnePieceError, code: int
) -> None:
    """``submit``, ``watch`` and ``result`` tell the same."""

    def fail(name: str, inputs: Any) -> None:
        raise error

    async with served(capsys, fail) as the:
        assert await the.run("submit", "echo", "--input", "text=x") == code
        assert f"onepiece submit: {type(error).__name__}: {error.message}" in the.err
        assert await the.run("watch", the.only) == code
        assert await the.run("result", the.only) == code


@pytest.mark.parametrize("rejection", [Overloaded("17 in flight"), NotReady("loading")])
async def test_a_rejection_has_an_exit_code(capsys: pytest.CaptureFixture[str], rejection: Any) -> None:
    """So has an unknown workflow; known ones are listed."""
    async with served(capsys) as the:
        the.frontend.rejection = rejection
        assert await the.run("submit", "echo", "--input", "text=x") == exits.REJECTED
        assert rejection.message in the.err
        assert await the.run("submit", "opera") == exits.REJECTED
        assert "echo, movie" in the.err


async def test_unknown_requests_and_gone_results_have_an_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """6, on every command that takes a UID."""
    async with served(capsys, shout) as the:
        for verb in ("watch", "result", "cancel"):
            assert await the.run(verb, "0" * 26) == exits.GONE
        await the.run("submit", "echo", "--input", "text=x")
        assert await the.run("result", the.only) == exits.GONE


async def test_nobody_there_has_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """The address is named."""
    async with served(capsys) as the:
        pass
    assert await the.run("nodes") == exits.UNREACHABLE
    assert the.url in the.err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["frobnicate"],
        ["submit"],
        ["list", "--state", "lost"],
        ["bench", "speed"],
        ["nodes", "--server", "ftp://x"],
        ["drain", "n1", "--timeout", "nan"],
        ["drain", "n1", "--timeout", "-1"],
    ],
)
def test_a_wrong_command_is_usage(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, as argparse has it, also where the mistake is found later."""
    try:
        code: Any = main(argv)
    except SystemExit as ended:
        code = ended.code
    assert code == exits.USAGE
    assert capsys.readouterr().err


async def test_results_go_to_files_and_pipes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """-o writes the bytes and purges, --keep does not; a pipe gets bytes bare."""
    async with served(capsys, lambda name, inputs: b"\x00video\xff") as the:
        argv = ["submit", "echo", "--input", "text=x", "--quiet", "--keep"]
        assert await the.run(*argv, "-o", f"{tmp_path}/clip.mp4") == 0
        assert (tmp_path / "clip.mp4").read_bytes() == b"\x00video\xff"
        assert f"wrote {tmp_path}/clip.mp4 (7 B)\n" == the.err
        assert not the.frontend.requests_by_uid[the.only].is_purged
        assert await the.run("result", the.only, "-o", f"{tmp_path}/nowhere/clip.mp4") == exits.USAGE
        piped = await anyio.run_process(
            [sys.executable, "-m", "onepiece.cli", "result", the.only, "--server", the.url], env=ENVIRONMENT
        )
        assert piped.stdout == b"\x00video\xff"
        assert the.frontend.requests_by_uid[the.only].is_purged


async def test_what_cannot_be_printed_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor has no text: the command says how to get it, and it is still there."""
    async with served(capsys, lambda name, inputs: np.arange(3)) as the:
        assert await the.run("submit", "echo", "--input", "text=x") == 0
        assert not the.out
        assert f"onepiece result {the.only} -o FILE" in the.err
        assert not the.frontend.requests_by_uid[the.only].is_purged


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("{} >/dev/full", exits.USAGE),
        ("{} >&-", exits.OK),
        ("PYTHONIOENCODING=ascii {}", exits.OK),
    ],
)
async def test_what_was_not_printed_is_kept(
    command: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk behind standard output, none at all, or one that has no sign for it."""
    async with served(capsys, lambda name, inputs: "\N{SKULL AND CROSSBONES}") as the:
        submit = f"{sys.executable} -m onepiece.cli submit echo --input text=x --quiet --server {the.url}"
        ended = await anyio.run_process(command.format(submit), env=ENVIRONMENT, check=False)
        said = ended.stderr.decode()
        assert (ended.returncode, "Traceback" in said) == (code, False), said
        assert ("is kept" in said) is (code == exits.OK)
        assert not the.frontend.requests_by_uid[the.only].is_purged


async def test_json_is_on_all_that_lists(capsys: pytest.CaptureFixture[str]) -> None:
    """Arrays for lists, lines for events, objects for the rest; standard error stays empty."""
    async with served(capsys, shout) as the:
        the.frontend.node_views = [
            NodeView("n1", 1, "tcp://h:1", None, ["worker"], "alive", ["cpu:0"], [], 1, 0.5)
        ]
        assert await the.run("submit", "echo", "--input", "text=x", "--json", "--keep") == 0
        lines = [json.loads(line) for line in the.out.splitlines()]
        assert [line.get("kind") for line in lines] == ["accepted", "finished", None]
        assert lines[-1] == {"uid": the.only, "value": "X!"}
        assert not the.err
        assert await the.run("submit", "echo", "--input", "text=x", "--json", "--no-wait", "--key", "k") == 0
        assert json.loads(the.out)["key"] == "k"
        for verb, name in (("list", "workflow"), ("nodes", "node"), ("workflows", "name")):
            assert await the.run(verb, "--json") == 0
            assert json.loads(the.out)[0][name] in {"echo", "n1"}
        uid = json.loads(the.out)[0] and next(iter(the.frontend.requests_by_uid))
        assert await the.run("watch", uid, "--json") == 0
        assert len(the.out.splitlines()) == 2
        assert await the.run("cancel", uid, "--json") == 0
        assert json.loads(the.out)["state"] == "finished"
        assert await the.run("result", uid, "--json") == 0
        assert json.loads(the.out) == {"uid": uid, "value": "X!"}


async def test_lists_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """A head and a row each, nothing cut."""
    async with served(capsys) as the:
        the.frontend.node_views = [
            NodeView(
                "n1",
                1,
                "tcp://h:1",
                None,
                ["worker", "proxy"],
                "suspect",
                ["cpu:0"],
                [{"stage": "stages.echo:shout", "state": "ready"}],
                1,
                0.5,
            )
        ]
        await the.run("submit", "echo", "--input", "text=x", "--no-wait")
        uid = the.out.strip()
        the.frontend.fail(uid, StageFailed("no"))
        assert await the.run("list", "--state", "failed", "--limit", "3") == 0
        head, row = the.out.splitlines()
        assert head.split()[:3] == ["UID", "WORKFLOW", "STATE"]
        assert row.startswith(f"{uid}  echo      failed (StageFailed)")
        assert await the.run("nodes") == 0
        assert "worker,proxy  tcp://h:1" in the.out
        assert "  shout:ready  " in the.out
        assert await the.run("workflows") == 0
        assert "echo(text: str) -> str" in the.out
        assert await the.run("cancel", uid) == 0
        assert the.out == f"{uid} failed\n"


async def test_the_server_comes_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is used without --server, and --server wins over it."""
    async with served(capsys) as the:
        monkeypatch.setenv("ONEPIECE_SERVER", the.url)
        assert await to_thread.run_sync(main, ["nodes"]) == 0
        monkeypatch.setenv("ONEPIECE_SERVER", "http://127.0.0.1:1")
        assert await the.run("nodes") == 0


async def test_an_interrupted_submit_cancels_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C: the request is cancelled, the exit code says so, and there is no traceback."""
    async with served(capsys) as the:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "onepiece.cli", "submit", "echo", "--input", "text=x"],
            *["--server", the.url],
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
        )
        assert process.stderr is not None
        try:
            with anyio.fail_after(30):
                assert b"accepted" in await process.stderr.readline()
                process.send_signal(signal.SIGINT)
                rest = await process.stderr.read()
                assert await process.wait() == exits.INTERRUPTED
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert (await the.frontend.status(the.only)).state.value == "cancelled"
        assert b"Traceback" not in rest


async def test_drain_says_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Once, not with each look; when time is over the exit code says that it has not drained."""
    async with served(capsys) as the:
        view = NodeView("n1", 1, "tcp://h:1", None, ["worker"], "alive", ["cpu:0"], [], 1, 0.5, ("a", "b"))
        the.frontend.node_views = [view]
        assert await the.run("drain", "n1", "--timeout", "1.5") == exits.FAILED
        assert (the.out, the.err) == ("n1 draining\n", "n1 waits for a; b\n")


async def test_drain_ends_when_somebody_resumes_the_node(capsys: pytest.CaptureFixture[str]) -> None:
    """It does not wait for what nobody wants any more."""
    async with served(capsys) as the:
        the.frontend.node_views = [
            NodeView("n1", 1, "tcp://h:1", None, ["worker"], "alive", ["cpu:0"], [], 1, 0.5, ("work",))
        ]
        asked = the.frontend.asked_nodes
        drained = asyncio.ensure_future(the.run("drain", "n1"))
        with anyio.fail_after(30):
            while not asked:  # noqa: ASYNC110 - a fake
                await asyncio.sleep(0.01)
            await the.frontend.set_draining("n1", draining=False)
            assert await drained == exits.REJECTED
        assert "was told to resume" in the.err


@pytest.mark.parametrize("subject", sorted(BENCHES))
def test_bench_passes_its_arguments_on(subject: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands behind the subject is the subject's; its exit code is ours."""
    seen: list[list[str]] = []

    def run(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    fake = types.ModuleType(BENCHES[subject])
    monkeypatch.setattr(fake, "run", run, raising=False)
    monkeypatch.setitem(sys.modules, BENCHES[subject], fake)
    assert main(["bench", subject, "--json", "--rounds", "3"]) == 7
    assert seen == [["--json", "--rounds", "3"]]
