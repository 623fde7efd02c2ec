"""``onepiece dev``: everything in one process, and a word when it is ready."""

import sys
from typing import Final

import onepiece
from onepiece.client import Client
from onepiece.errors import OnePieceError
from onepiece.log import configure
from onepiece.node.dev import run_dev
from onepiece.node.node import Node

PROBE_SECONDS: Final = 3600.0


async def run(workflow: str, *, http: str, listen: str) -> None:
    """Run until a signal stops it.

    Args:
        workflow: ``module:workflow``.
        http: Where clients reach it, as ``host:port``; port 0 takes a free one.
        listen: Where nodes reach it.

    Raises:
        ConfigError: An address is in use, or the workflow cannot be imported.
        DefinitionError: The module defines a stage or workflow wrongly.
    """
    configure()
    await run_dev(workflow, http=http, listen=listen, started=_tell_ready)


async def _tell_ready(node: Node) -> None:
    """Say where it serves and how to try it, once every stage is loaded."""
    assert node.http is not None
    try:
        async with onepiece.connect(node.http) as client:
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
