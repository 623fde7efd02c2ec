"""The benchmark programs that come with a wire: how they are run, and what their tables say.

``ib_write_bw`` and ``ib_write_lat`` come with perftest, ``ucx_perftest`` with UCX. Each is run twice, as a
server and as a client that finds it on this machine; the client's table is read. Their MB are MiB.
"""

import asyncio
import os
import re
import shutil
import socket
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from attrs import frozen

LOOPBACK: Final = "127.0.0.1"

_MIB: Final = 1 << 20
_RUN_SECONDS: Final = 300.0
_KNOCK_SECONDS: Final = 60.0
_KNOCK_PAUSE_SECONDS: Final = 0.3
_WORDS_SHOWN: Final = 2000
_FINAL_COLUMNS: Final = 8
_NUMBER: Final = re.compile(r"[\d.]+|inf")
"""An average over no time at all is infinite; what is read is that over all."""


class ProgramError(Exception):
    """A program is missing, failed, or printed no table; the message says what to do or what it printed."""


@frozen
class Program:
    """Server and client; ``PORT`` stands for a free port in either."""

    server: tuple[str, ...]
    client: tuple[str, ...]
    environment: Mapping[str, str]
    """Beside this process's own."""


# perftest


def write_bandwidth(server_device: str, client_device: str, size_bytes: int, count: int) -> Program:
    """Writes of ``size_bytes`` one behind the other, many under way at a time."""
    return _perftest("ib_write_bw", server_device, client_device, size_bytes, max(count, 5))


def write_latency(server_device: str, client_device: str, size_bytes: int, count: int) -> Program:
    """Writes that answer each other; both sides look at their memory without pause."""
    return _perftest("ib_write_lat", server_device, client_device, size_bytes, max(count, 5))


def _perftest(name: str, server_device: str, client_device: str, size_bytes: int, count: int) -> Program:
    path = _found(shutil.which(name), name, "apt-get install perftest")
    said = ("-s", str(size_bytes), "-n", str(count), "-F", "-p", "PORT")
    return Program((path, "-d", server_device, *said), (path, "-d", client_device, *said, LOOPBACK), {})


def bandwidth_of(text: str, size_bytes: int) -> float:
    """The average of ``ib_write_bw``, in GB/s."""
    return float(_line_of(text, size_bytes)[3]) * _MIB / 1e9


def latency_of(text: str, size_bytes: int) -> float:
    """The typical latency of ``ib_write_lat``, one way, in microseconds."""
    return float(_line_of(text, size_bytes)[4])


def _line_of(text: str, size_bytes: int) -> list[str]:
    """The line of numbers that begins with the size."""
    for line in reversed(text.splitlines()):
        words = line.split()
        if words[:1] == [str(size_bytes)] and len(words) > 4:
            return words
    raise ProgramError(f"no line for {size_bytes} bytes in:\n{text[-_WORDS_SHOWN:]}")


# UCX


def put_bandwidth(environment: Mapping[str, str], size_bytes: int, count: int) -> Program:
    """Puts of ``size_bytes`` one behind the other, from and into memory of that size."""
    return _ucx("ucp_put_bw", environment, size_bytes, count)


def put_latency(environment: Mapping[str, str], size_bytes: int, count: int) -> Program:
    """Puts that answer each other."""
    return _ucx("ucp_put_lat", environment, size_bytes, count)


def _ucx(test: str, environment: Mapping[str, str], size_bytes: int, count: int) -> Program:
    package = _ucx_package()
    beside = package / "bin" / "ucx_perftest" if package is not None else None
    if beside is not None and beside.exists():
        path = str(beside)
        environment = {**environment, "LD_LIBRARY_PATH": str(beside.parents[1] / "lib")}
    else:
        path = _found(
            shutil.which("ucx_perftest"),
            "ucx_perftest",
            "pip install 'onepiece[ucx]', or apt-get install ucx-utils",
        )
    # Without a warm-up of its own the first pass would find memory that nobody has touched.
    said = ("-t", test, "-s", str(size_bytes), "-n", str(count), "-w", str(max(2, count // 10)), "-f")
    return Program((path, "-p", "PORT"), (path, LOOPBACK, "-p", "PORT", *said), environment)


def _ucx_package() -> Path | None:
    spec = find_spec("libucx")
    places = [] if spec is None else spec.submodule_search_locations or []
    return Path(places[0]) if places else None


def put_bandwidth_of(text: str, _: int) -> float:
    """The overall bandwidth of ``ucp_put_bw``, in GB/s."""
    return _final(text)[5] * _MIB / 1e9


def put_latency_of(text: str, _: int) -> float:
    """The overall latency of ``ucp_put_lat``, one way, in microseconds."""
    return _final(text)[3]


def _final(text: str) -> list[float]:
    """The final line: count; three latencies, the last overall; bandwidth and rate, average and overall."""
    for line in reversed(text.splitlines()):
        words = line.removeprefix("Final:").split()
        if len(words) == _FINAL_COLUMNS and all(map(_NUMBER.fullmatch, words)):
            return [float(word) for word in words]
    raise ProgramError(f"no final line in:\n{text[-_WORDS_SHOWN:]}")


# Running


def _found(path: str | None, name: str, hint: str) -> str:
    if path is None:
        raise ProgramError(f"there is no {name} here: {hint}")
    return path


async def output_of(program: Program) -> str:
    """Run server and client; what the client printed. Raises ``ProgramError``; both end with this call."""
    port = str(_free_port())
    environment = {**os.environ, **program.environment}
    server = await _started(_with_port(program.server, port), environment, DEVNULL)
    try:
        return await _asked(_with_port(program.client, port), environment)
    finally:
        await _ended(server)


async def _asked(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Knock until the server listens, which nothing else tells."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + _KNOCK_SECONDS
    while True:
        client = await _started(command, environment, PIPE)
        try:
            async with asyncio.timeout(_RUN_SECONDS):
                said, _ = await client.communicate()
        except TimeoutError:
            raise ProgramError(f"{command[0]} did not end within {_RUN_SECONDS} s") from None
        finally:
            await _ended(client)
        if client.returncode == 0:
            return said.decode(errors="replace")
        if loop.time() > give_up_at:
            raise ProgramError(
                f"{' '.join(command)} failed:\n{said.decode(errors='replace')[-_WORDS_SHOWN:]}"
            )
        await asyncio.sleep(_KNOCK_PAUSE_SECONDS)


async def _started(
    command: Sequence[str], environment: Mapping[str, str], output: int
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command, env=environment, stdin=DEVNULL, stdout=output, stderr=STDOUT if output == PIPE else output
    )


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


def _with_port(command: Sequence[str], port: str) -> list[str]:
    return [port if word == "PORT" else word for word in command]


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as server:
        return int(server.getsockname()[1])
