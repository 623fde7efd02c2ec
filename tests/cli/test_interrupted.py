"""Ctrl-C between the sending of a request and its reply: nothing runs on that nobody knows of."""

import asyncio
from argparse import Namespace
from typing import Any

import pytest

import onepiece
from onepiece.cli import remote
from onepiece.errors import NodeUnreachable
from onepiece.node.http_testing import FakeFrontend
from onepiece.node.proxy import build_app, serve
from onepiece.requests import RequestStatus
from stages.echo import echo


class Silent(FakeFrontend):
    """Accepts a request, and holds the first reply back."""

    def __init__(self) -> None:
        super().__init__([echo])
        self.accepted = asyncio.Event()

    async def submit(self, *args: Any, **how: Any) -> RequestStatus:
        """Accept it; only who asks again is told."""
        status = await super().submit(*args, **how)
        if not self.accepted.is_set():
            self.accepted.set()
            await asyncio.Event().wait()
        return status


ARGUMENTS = Namespace(
    workflow="echo",
    input=["text=x"],
    timeout=None,
    key=None,
    priority=0,
    size_class="",
    no_wait=True,
    json=False,
    output=None,
)


async def test_a_request_whose_reply_did_not_come_is_cancelled(capsys: pytest.CaptureFixture[str]) -> None:
    """It was accepted under a key that was made for it, and by that it is found: one request, cancelled."""
    frontend = Silent()
    async with (
        serve(build_app(frontend), shutdown_seconds=1) as port,
        onepiece.connect(f"http://127.0.0.1:{port}") as client,
    ):
        submitting = asyncio.create_task(remote.submit(client, ARGUMENTS))
        await frontend.accepted.wait()
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
    [request] = frontend.requests_by_uid.values()
    assert request.status.state.value == "cancelled"
    assert capsys.readouterr().err == f"interrupted: {request.status.uid} is cancelled\n"


async def test_what_cannot_be_found_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody answers any more: the user is told that the request may run."""
    tries = 0

    async def submit() -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            await asyncio.Event().wait()
        raise NodeUnreachable("nobody answers")

    submitting = asyncio.create_task(remote._submitted(submit))
    await asyncio.sleep(0)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert "is not known" in capsys.readouterr().err
    assert tries == 2
