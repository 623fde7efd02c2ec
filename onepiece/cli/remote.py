"""The commands that talk to a proxy: submit, watch, result, cancel, list, nodes, placement, drain, ..."""

import argparse
import asyncio
import functools
import json
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

import anyio

import onepiece
from onepiece.cli import exits, inputs
from onepiece.cli.columns import bytes_text, columns, seconds_text
from onepiece.cli.placement import placement_text
from onepiece.cli.progress import Display, RequestView, display
from onepiece.client import Client, NodeInfo, RequestHandle, WorkflowInfo
from onepiece.client.api import event_to_plain, status_to_plain, to_plain
from onepiece.client.result_file import is_written_through, replaced_by
from onepiece.errors import ConfigError, NotReady, OnePieceError, UnknownNode, UnknownWorkflow
from onepiece.requests import RequestState, RequestStatus

Arguments: TypeAlias = argparse.Namespace
Command: TypeAlias = Callable[[Client, Arguments], Awaitable[int]]

CANCEL_SECONDS: Final = 5.0
"""How long an interrupted ``submit`` takes to cancel its request."""
STDOUT: Final = "-"
ALIVE: Final = "alive"
DRAINING: Final = "draining"
DRAINED: Final = "drained"
LOOK_SECONDS: Final = 0.3
"""Between two looks at a node that drains."""


async def run(command: Command, arguments: Arguments) -> int:
    """Run a command with a client of the server that was named."""
    async with onepiece.connect(arguments.server) as client:
        return await command(client, arguments)


async def submit(client: Client, arguments: Arguments) -> int:
    """Submit a request, show its progress, and fetch its result."""
    workflow = await _workflow(client, arguments.workflow)
    if not arguments.no_wait:
        _check_output(arguments.output)
    values = await anyio.to_thread.run_sync(inputs.read_inputs, workflow, arguments.input)
    handle = await _submitted(
        functools.partial(
            client.submit,
            workflow.name,
            values,
            timeout=arguments.timeout,
            key=arguments.key or secrets.token_urlsafe(18),
            priority=arguments.priority,
            size_class=arguments.size_class,
        )
    )
    if arguments.no_wait:
        print(_json(status_to_plain(await handle.status())) if arguments.json else handle.uid)
        return exits.OK
    try:
        await _follow(handle, arguments)
        return await _deliver(handle, arguments)
    except asyncio.CancelledError:
        with anyio.move_on_after(CANCEL_SECONDS, shield=True):
            status = await handle.cancel()
            sys.stderr.write(f"interrupted: {handle.uid} is {status.state.value}\n")
        raise


async def _submitted(submit: Callable[[], Awaitable[RequestHandle[Any]]]) -> RequestHandle[Any]:
    """Submit; interrupted before the reply, ask by the same key what became of it, and cancel that."""
    try:
        return await submit()
    except asyncio.CancelledError:
        said = "whether the request was accepted is not known; `onepiece list` shows what runs"
        with anyio.move_on_after(CANCEL_SECONDS, shield=True), suppress(OnePieceError):
            status = await (await submit()).cancel()
            said = f"{status.uid} is {status.state.value}"
        sys.stderr.write(f"interrupted: {said}\n")
        raise


async def watch(client: Client, arguments: Arguments) -> int:
    """Show a request's progress until it ends; leaving does not disturb it."""
    handle = client.attach(arguments.uid)
    await _follow(handle, arguments)
    status = await handle.status()
    if status.error is not None:
        raise OnePieceError.from_wire(status.error)
    return exits.OK


async def result(client: Client, arguments: Arguments) -> int:
    """Fetch the result of a request, waiting for it if it still runs."""
    _check_output(arguments.output)
    return await _deliver(client.attach(arguments.uid), arguments)


async def cancel(client: Client, arguments: Arguments) -> int:
    """Cancel a request; one that has ended stays as it ended."""
    status = await client.attach(arguments.uid).cancel()
    print(_json(status_to_plain(status)) if arguments.json else f"{status.uid} {status.state.value}")
    return exits.OK


async def list_requests(client: Client, arguments: Arguments) -> int:
    """List the latest requests."""
    found = await client.requests(limit=arguments.limit, state=arguments.state)
    if arguments.json:
        print(_json([status_to_plain(status) for status in found]))
        return exits.OK
    head = ["UID", "WORKFLOW", "STATE", "AGE", "TOOK", "RESULT", "KEY"]
    print(columns(head, [_request_row(status, time.time()) for status in found]))
    return exits.OK


async def nodes(client: Client, arguments: Arguments) -> int:
    """List the nodes of the set, as the proxy sees them."""
    found = await client.nodes()
    if arguments.json:
        print(_json([to_plain(node) for node in found]))
        return exits.OK
    head = ["NODE", "STATE", "ROLES", "ADDRESS", "HTTP", "DEVICES", "ACTORS", "HEARTBEAT"]
    rows = [
        [
            node.node,
            node.state,
            ",".join(node.roles),
            node.address,
            node.http or "-",
            ",".join(node.devices) or "-",
            ",".join(_actor_text(actor) for actor in node.actors) or "-",
            "-" if node.heartbeat_age_seconds is None else f"{seconds_text(node.heartbeat_age_seconds)} ago",
        ]
        for node in found
    ]
    print(columns(head, rows))
    return exits.OK


async def placement(client: Client, arguments: Arguments) -> int:
    """Show what is wanted of each stage and what there is, and the moves and why."""
    found = await client.placement()
    print(_json(found) if arguments.json else placement_text(found))
    return exits.OK


async def admission(client: Client, arguments: Arguments) -> int:
    """Show what the proxy lets in, and how often it refused and why."""
    found = await client.admission()
    if arguments.json:
        print(_json(found))
        return exits.OK
    counts = "  ".join(f"{name} {count}" for name, count in found["counts"].items())
    print(f"in flight {found['in_flight']} of {found['in_flight_max']}; since the start: {counts}")
    print(
        f"share of the set {found['share']:.0%}, one of {found['proxies']} proxies, "
        f"asked for {found['demand']:.0%} of the set"
    )
    head = ["WORKFLOW", "IN FLIGHT", "UNLOADED", "WAIT NOW", "AT MOST"]
    print(columns(head, [_admission_row(name, each) for name, each in found["workflows"].items()]))
    return exits.OK


def _admission_row(name: str, found: Mapping[str, Any]) -> list[str]:
    unloaded, wait, rate = (
        found[key] for key in ("unloaded_seconds", "wait_seconds", "requests_per_second_max")
    )
    return [
        name,
        str(found["in_flight"]),
        "-" if unloaded is None else seconds_text(unloaded),
        "-" if wait is None else seconds_text(wait),
        "-" if rate is None else f"{rate:.3g}/s",
    ]


async def drain(client: Client, arguments: Arguments) -> int:
    """Let a node take no new work, and wait until it holds nothing any more."""
    node = await client.drain(arguments.node)
    if not arguments.no_wait:
        try:
            node = await _drained(client, node, arguments.timeout)
        except asyncio.CancelledError:
            sys.stderr.write(f"interrupted: {node.node} drains on, until `onepiece resume {node.node}`\n")
            raise
    print(_json(to_plain(node)) if arguments.json else f"{node.node} {node.state}")
    return exits.OK if arguments.no_wait or node.state == DRAINED else exits.FAILED


async def _drained(client: Client, node: NodeInfo, timeout: float | None) -> NodeInfo:
    """Look at a node until it has drained, or time is over; says what it waits for whenever that changes."""
    has_begun = False
    said: Sequence[str] = ()
    with anyio.move_on_after(timeout):
        while node.state != DRAINED:
            await anyio.sleep(LOOK_SECONDS)
            node = await _member(client, node.node)
            if has_begun and node.state == ALIVE:
                raise NotReady(f"{node.node} was told to resume while it drained: it takes work again")
            has_begun = has_begun or node.state == DRAINING
            if node.waits_for and node.waits_for != said:
                said = node.waits_for
                sys.stderr.write(f"{node.node} waits for {'; '.join(said)}\n")
    return node


async def _member(client: Client, name: str) -> NodeInfo:
    """A member as the set sees it, and as itself if it answers; raises ``UnknownNode`` if it left."""
    found = next((each for each in await client.nodes() if each.node == name), None)
    if found is None:
        raise UnknownNode(f"{name} left the set while it drained", node=name)
    if found.state == DRAINING:
        with suppress(OnePieceError):  # it is stopping, or its release does not say yet
            return await client.node(name)
    return found


async def resume(client: Client, arguments: Arguments) -> int:
    """Let a node that drains take work again."""
    node = await client.resume(arguments.node)
    print(_json(to_plain(node)) if arguments.json else f"{node.node} {node.state}")
    return exits.OK


async def workflows(client: Client, arguments: Arguments) -> int:
    """List what can be submitted."""
    found = await client.workflows()
    if arguments.json:
        print(_json([to_plain(workflow) for workflow in found]))
    else:
        print("\n".join(_signature(workflow) for workflow in found))
    return exits.OK


async def _workflow(client: Client, name: str) -> WorkflowInfo:
    known = await client.workflows()
    for workflow in known:
        if workflow.name == name:
            return workflow
    names = ", ".join(workflow.name for workflow in known) or "none"
    raise UnknownWorkflow(f"no workflow {name!r} is registered; there are: {names}", workflow=name)


async def _follow(handle: RequestHandle[Any], arguments: Arguments) -> None:
    """Show events until the final one, and what each stage took."""
    view = RequestView(handle.uid)
    with display(quiet=arguments.quiet or arguments.json) as shown:
        await _show(handle, view, shown, as_json=arguments.json)
    if not (arguments.quiet or arguments.json) and view.stages:
        sys.stderr.write(f"\n{view.summary()}\n")


async def _show(handle: RequestHandle[Any], view: RequestView, shown: Display, *, as_json: bool) -> None:
    async with aclosing(handle.events()) as events:
        async for event in events:
            shown.show(view, event, view.take(event))
            if as_json:
                print(_json(event_to_plain(event)), flush=True)


async def _deliver(handle: RequestHandle[Any], arguments: Arguments) -> int:
    """Fetch the result, to where it was asked for."""
    if arguments.output not in {None, STDOUT}:
        size = await handle.save(arguments.output, keep=arguments.keep)
        _say_saved(handle.uid, Path(arguments.output), size, as_json=arguments.json)
        return exits.OK
    # Kept until it is known that it can be shown: what cannot be is still there to be fetched.
    value = await handle.result(keep=True)
    if not _print_value(value, arguments, handle.uid):
        what = bytes_text(len(value)) if isinstance(value, bytes) else type(value).__name__
        sys.stderr.write(f"the result ({what}) is kept: onepiece result {handle.uid} -o FILE\n")
        return exits.OK
    if not arguments.keep:
        await handle.drop()
    return exits.OK


def _check_output(output: str | None) -> None:
    """See that the result can be written there before anything is asked for, not when it has been made."""
    if output is None or output == STDOUT:
        return
    path = Path(output)
    if path.is_dir():
        raise ConfigError(f"--output {output} is a directory: name a file in it")
    if is_written_through(path):
        if not os.access(path, os.W_OK):
            raise ConfigError(f"--output {output} may not be written to: name another file")
        return
    parent = replaced_by(path).parent
    if not parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {parent}: make it, or name another file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {output}: {parent} may not be written to: name another file")


def _say_saved(uid: str, path: Path, size: int, *, as_json: bool) -> None:
    if as_json:
        print(_json({"uid": uid, "output": str(path), "bytes": size}))
    else:
        sys.stderr.write(f"wrote {path} ({bytes_text(size)})\n")


def _print_value(value: Any, arguments: Arguments, uid: str) -> bool:
    """Print what can be printed; false if the value is not for this standard output."""
    if sys.stdout is None:  # it was closed by whoever started the command
        return False
    if isinstance(value, bytes) and not arguments.json:
        if arguments.output != STDOUT and sys.stdout.isatty():
            return False
        sys.stdout.buffer.write(value)
    else:
        try:
            print(_text_of(value, arguments, uid))
        except (TypeError, UnicodeEncodeError):  # it holds tensors, or what the terminal has no signs for
            return False
    sys.stdout.flush()  # what was not written must not be dropped from the store
    return True


def _text_of(value: Any, arguments: Arguments, uid: str) -> str:
    """The result as it is printed; raises ``TypeError`` if it has no text."""
    if arguments.json:
        return _json({"uid": uid, "value": to_plain(value)})
    return value if isinstance(value, str) else _json(to_plain(value))


def _request_row(status: RequestStatus, now: float) -> Sequence[str]:
    took = "-" if status.finished_at is None else seconds_text(status.finished_at - status.accepted_at)
    state = status.state.value
    if status.state is RequestState.FAILED and status.error is not None:
        state = f"failed ({status.error.get('error', '')})"
    return [
        status.uid,
        status.workflow,
        state,
        seconds_text(max(0.0, now - status.accepted_at)),
        took,
        "-" if status.result_bytes is None else bytes_text(status.result_bytes),
        status.key or "-",
    ]


def _actor_text(actor: Mapping[str, Any]) -> str:
    stage = str(actor.get("stage", "?")).rpartition(":")[2]
    return f"{stage}:{actor.get('state', '?')}"


def _signature(workflow: WorkflowInfo) -> str:
    described = [
        f"{info.name}: {info.type}" + ("" if info.required else f" = {info.default!r}")
        for info in workflow.inputs
    ]
    return f"{workflow.name}({', '.join(described)}) -> {workflow.returns}"


def _json(plain: Any) -> str:
    return json.dumps(plain, separators=(",", ":"))
