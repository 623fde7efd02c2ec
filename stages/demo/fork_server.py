"""A process that imports what nodes need, once, and forks the nodes.

Importing torch, diffusers and transformers takes seconds of a core; four workers on two cores would
pay it four times. Here one process pays, and a fork costs milliseconds. That is sound only while the
process has a single thread, no event loop and no OpenMP region behind it, so that it does nothing but
import, fork and wait; each node begins its own life in ``onepiece.node``.

Its owner talks to it in lines of JSON::

    owner:  {"start": "seed", "arguments": ["--roles", ...], "log": "/path"}
            {"preload": true}
    server: {"folder": "/tmp/onepiece-..."}      once: for the set's files, removed at the end
            {"started": "seed", "process_id": 17}
            {"preloaded": 4.1, "threads": 1}     seconds; threads of this process
            {"ended": "seed", "status": 0}       negative: the signal that ended it

Nodes may be started before ``preload``: those that run no stages need nothing of it, and come up
meanwhile.

Nobody is left behind. The server stops its nodes (SIGTERM, again, SIGKILL) and removes its folder when
its input ends, which happens however the owner dies, and on SIGTERM, which the kernel sends it then, so
that it need not finish importing first. A node is killed by the kernel if the server dies.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from attrs import define, field

from onepiece.node.__main__ import main as run_node

_LIGHT: Final = ("stages.image_to_video",)
_HEAVY: Final = ("av", "PIL.Image")
_STOP_STEPS: Final = ((signal.SIGTERM, 10.0), (signal.SIGTERM, 4.0), (signal.SIGKILL, 4.0))
_PR_SET_PDEATHSIG: Final = 1
_LINE_BYTES_MAX: Final = 65536


@define
class ForkServer:
    """The children, and the two ends of the talk with the owner."""

    _folder: str
    _children: dict[int, str] = field(factory=dict)
    _selector: selectors.BaseSelector = field(factory=selectors.DefaultSelector)
    _pending: bytes = b""
    _wake: tuple[int, int] = (-1, -1)

    def serve(self) -> None:
        """Obey until the input ends."""
        self._watch_children()
        self._selector.register(0, selectors.EVENT_READ)
        self._report(folder=self._folder)
        while True:
            ready = {key.fd for key, _ in self._selector.select()}
            self._reap()
            if 0 in ready:
                data = os.read(0, _LINE_BYTES_MAX)
                if not data:
                    return
                for command in self._commands(data):
                    self._obey(command)

    def stop(self) -> None:
        """End all nodes: the first one, which the others say good-bye to, when these have ended."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if 0 in self._selector.get_map():
            self._selector.unregister(0)
        self._end(set(list(self._children)[1:]))
        self._end(set(self._children))

    def _end(self, process_ids: set[int]) -> None:
        """End these, more firmly each time."""
        for number, seconds in _STOP_STEPS:
            for process_id in process_ids & self._children.keys():
                os.kill(process_id, number)
            limit = time.monotonic() + seconds
            while process_ids & self._children.keys() and (remaining := limit - time.monotonic()) > 0:
                self._selector.select(remaining)
                self._reap()

    def _watch_children(self) -> None:
        """Let SIGCHLD make the selector return."""
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        self._selector.register(self._wake[0], selectors.EVENT_READ)

    def _commands(self, data: bytes) -> Iterator[dict[str, Any]]:
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            yield json.loads(line)

    def _obey(self, command: dict[str, Any]) -> None:
        match command:
            case {"start": str(name), "arguments": [*arguments], "log": str(log)}:
                self._start(name, arguments, log)
            case {"preload": True}:
                started = time.monotonic()
                for module in _HEAVY:
                    importlib.import_module(module)
                importlib.import_module("stages._diffusers").preload()
                seconds = round(time.monotonic() - started, 2)
                self._report(preloaded=seconds, threads=len(list(Path("/proc/self/task").iterdir())))
            case _:
                raise ValueError(f"no command: {command!r}")

    def _start(self, name: str, arguments: Sequence[str], log: str) -> None:
        gc.collect()
        gc.freeze()  # what is shared with the children is not touched, and so not copied, by collections
        server = os.getpid()
        process_id = os.fork()
        if process_id == 0:
            self._become_node(server, arguments, log)
        self._children[process_id] = name
        self._report(started=name, process_id=process_id)

    def _become_node(self, server: int, arguments: Sequence[str], log: str) -> NoReturn:
        """Cut every tie to the server but its death, and run a node."""
        status = 1
        try:
            _signal_at_parents_death(signal.SIGKILL)
            if os.getppid() != server:  # it died before the line above
                os._exit(status)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            self._selector.close()
            for descriptor in self._wake:
                os.close(descriptor)
            _redirect(log)
            status = run_node(arguments)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001 - the last frame of this process: nothing may return to the server's
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        if self._wake[0] >= 0:
            _drain(self._wake[0])
        while self._children:
            process_id, status = os.waitpid(-1, os.WNOHANG)
            if process_id == 0:
                return
            name = self._children.pop(process_id)
            self._report(ended=name, status=os.waitstatus_to_exitcode(status))

    def _report(self, **fields: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the owner is gone; the end of the input says so too
            os.write(1, json.dumps(fields).encode() + b"\n")


def _signal_at_parents_death(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _redirect(log: str) -> None:
    """Nothing to read; everything that is written goes to the log."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(file)


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        pass


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler at all: without one, the signal would not reach the wake-up descriptor."""


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> None:
    """Serve until the owner is gone."""
    signal.signal(signal.SIGTERM, _leave)
    _signal_at_parents_death(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with tempfile.TemporaryDirectory(prefix="onepiece-") as folder:
        server = ForkServer(folder)
        try:
            for module in _LIGHT:
                importlib.import_module(module)
            server.serve()
        finally:
            server.stop()


if __name__ == "__main__":
    main()
