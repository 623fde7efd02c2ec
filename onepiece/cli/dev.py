"""``onepiece dev``: everything in one process, and a word when it is ready."""

import asyncio
import sys
from typing import Final

import onepiece
from onepiece.client import Client
from onepiece.errors import OnePieceError
from onepiece.log import configure
from onepiece.node.node import run_dev

PROBE_SECONDS: Final = 3600.0


async def run(workflow: str, *, http: str, listen: str) -> None:
    """Run until a signal stops it.

    Args:
        workflow: ``module:workflow``.
        http: Where clients reach it, as ``host:port``.
        listen: Where nodes reach it.

    Raises:
        ConfigError: An address is in use, or the workflow cannot be imported.
        DefinitionError: The module defines a stage or workflow wrongly.
    """
    configure()
    async with asyncio.TaskGroup() as tasks:
        telling = tasks.create_task(_tell_ready(http), name="tell ready")
        await run_dev(workflow, http=http, listen=listen)
        telling.cancel()


async def _tell_ready(http: str) -> None:
    """Say where it serves and how to try it, once every stage is loaded."""
    if http.endswith(":0"):
        return  # a free port was asked for: the node's log says which it became
    try:
        async with onepiece.connect(f"http://{http}") as client:
            await client.wait_ready(PROBE_SECONDS)
            sys.stderr.write(await _greeting(client))
            sys.stderr.flush()
    except OnePieceError:
        return  # the node itself says what is wrong with it


async def _greeting(client: Client) -> str:
    lines = [f"ready: {client.url}   (Ctrl-C stops)"]
    for workflow in await client.workflows():
        given = " ".join(f"--input {info.name}=..." for info in workflow.inputs if info.required)
        lines.append(f"try:   onepiece submit {workflow.name} {given}".rstrip())
    return "\n".join(lines) + "\n"
