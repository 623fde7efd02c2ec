"""What the environment's settings of UCX may change, and what not."""

import os
import subprocess
import sys

import pytest

from tests.transports.libucp_at_hand import needs_libucp
from transports.ucx_worker import without_tcp


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ("tcp", "self"),
        ("all", "^tcp"),
        ("*", "^tcp"),
        ("rc,sm,self,tcp", "rc,sm,self"),
        (r"rc, \tcp ,tcp:aux,t*", "rc"),
        ("^rc", "^rc,tcp"),
        ("^tcp", "^tcp"),
        ("sm,self", "sm,self"),
    ],
)
def test_tcp_of_ucx_is_left_out_of_any_setting(asked: str, taken: str) -> None:
    """Everything else of a setting stays as it is."""
    assert without_tcp(asked) == taken


WHO_LISTENS = """
import asyncio, os
from pathlib import Path
from transports.ucx_worker import Role, Worker

async def main():
    workers = [Worker(Role.OWNER), Worker(Role.PRODUCER)]
    folder = Path("/proc/self/fd")
    own = {os.readlink(folder / name) for name in os.listdir(folder) if os.path.lexists(folder / name)}
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table.splitlines()]
    print(sum(f"socket:[{row[9]}]" in own for row in rows if row[3] == "0A"))
    for worker in workers:
        worker.close()

asyncio.run(main())
"""


@needs_libucp
def test_no_setting_opens_a_port() -> None:
    """Machines set the variable for other programs; a port of UCX's would take anybody's writes."""
    environment = {**os.environ, "UCX_TLS": "all"}
    listening = subprocess.run(
        [sys.executable, "-c", WHO_LISTENS], env=environment, capture_output=True, text=True, check=True
    )
    assert listening.stdout == "0\n"
