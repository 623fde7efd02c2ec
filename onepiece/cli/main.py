"""``onepiece``: the command line."""

import argparse
import asyncio
import importlib
import math
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from onepiece._program import imported
from onepiece.cli import exits
from onepiece.cli.inputs import HELP as INPUT_HELP
from onepiece.cli.numbers import number_from
from onepiece.errors import ConfigError, OnePieceError, last_frame
from onepiece.requests import RequestState
from transports.errors import TransportError

DEFAULT_HTTP: Final = "127.0.0.1:7080"
PORT_MAX: Final = 65535
DEFAULT_SERVER: Final = f"http://{DEFAULT_HTTP}"
SERVER_VARIABLE: Final = "ONEPIECE_SERVER"
BENCHES: Final = {
    "transport": "onepiece.cli.bench_transport",
    "wires": "onepiece.cli.bench_wires",
    "hop": "onepiece.cli.bench_hop",
    "memory": "onepiece.cli.bench_memory",
    "delivery": "onepiece.cli.bench_delivery",
    "admission": "onepiece.cli.bench_admission",
    "moves": "onepiece.cli.bench_moves",
    "senders": "onepiece.cli.bench_senders",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments; those of the process unless given.

    Returns:
        The exit code, one of ``onepiece.cli.exits``.
    """
    arguments = build_parser().parse_args(argv)
    try:
        imported()
        code: int = arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        _drop_unwritten()  # whoever read our output has enough
        return exits.OK
    except (OnePieceError, TransportError, OSError, ExceptionGroup) as error:
        first = _first(error)
        if not isinstance(first, OnePieceError | TransportError | OSError):
            raise
        _drop_unwritten()
        sys.stderr.write(f"onepiece {arguments.command}: {_told(first)}\n")
        return exits.code_of(first)
    return code


def _drop_unwritten() -> None:
    """Forget what standard output does not take: the interpreter would fail once more on its last flush."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="onepiece",
        description="Serves multi-stage generative pipelines. See `onepiece VERB --help` for each verb.",
        epilog=exits.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"onepiece {_version()}")
    _add_server(parser, default=None)
    commands = parser.add_subparsers(dest="command", required=True, metavar="VERB")
    _add_dev(commands)
    _add_submit(commands)
    _add_watch(commands)
    _add_result(commands)
    _add_cancel(commands)
    _add_lists(commands)
    _add_drain(commands)
    _add_profile(commands)
    _add_plan(commands)
    _add_doctor(commands)
    _add_bench(commands)
    return parser


def _add_dev(commands: Any) -> None:
    parser = commands.add_parser(
        "dev",
        help="run a workflow and all it needs in this process",
        description="Run a workflow, its stages, a proxy and a result store in this one process.",
    )
    parser.add_argument("workflow", metavar="MODULE:WORKFLOW", help="for example stages.echo:echo")
    parser.add_argument(
        "--http",
        type=_host_and_port,
        default=DEFAULT_HTTP,
        metavar="HOST:PORT",
        help="where clients reach it (default: %(default)s)",
    )
    parser.add_argument(
        "--listen",
        default="tcp://127.0.0.1:0",
        metavar="ADDRESS",
        help="where nodes reach it (default: %(default)s, a free port)",
    )
    parser.set_defaults(run=_run_dev)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 on")
    return seconds


def _host_and_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port[:9]) <= PORT_MAX):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form HOST:PORT, as {DEFAULT_HTTP}")
    return text


def _add_submit(commands: Any) -> None:
    parser = commands.add_parser(
        "submit",
        help="submit a request and fetch its result",
        description="Submit a request, show its progress, and fetch its result. Ctrl-C cancels the request.",
    )
    parser.add_argument("workflow", metavar="WORKFLOW", help="its name; see `onepiece workflows`")
    parser.add_argument("-i", "--input", action="append", default=[], metavar="NAME=VALUE", help=INPUT_HELP)
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="fail the request after this long")
    parser.add_argument("--key", help="the same key again gives the same request (idempotency)")
    parser.add_argument(
        "--priority",
        type=int,
        default=0,
        metavar="N",
        help="from -2 to 2; where the set is full (default: 0)",
    )
    parser.add_argument(
        "--size-class", default="", metavar="NAME", help="which requests take about as long as this one"
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="print the UID and leave; see `onepiece result UID`"
    )
    _add_output(parser)
    _add_common(parser, "one JSON object per line: each event, then the result")
    parser.set_defaults(run=_remote("submit"))


def _add_watch(commands: Any) -> None:
    parser = commands.add_parser(
        "watch",
        help="show a request's progress until it ends",
        description="Show a request's progress until it ends. Ctrl-C stops watching, not the request.",
    )
    _add_uid(parser)
    parser.add_argument("-q", "--quiet", action="store_true", help="show nothing; the exit code tells")
    _add_common(parser, "one JSON object per line and event")
    parser.set_defaults(run=_remote("watch"))


def _add_result(commands: Any) -> None:
    parser = commands.add_parser(
        "result",
        help="fetch a request's result",
        description="Fetch a request's result, waiting for it if it still runs.",
    )
    _add_uid(parser)
    _add_output(parser)
    _add_common(parser, "print the value, or where it was written, as one JSON object")
    parser.set_defaults(run=_remote("result"))


def _add_cancel(commands: Any) -> None:
    parser = commands.add_parser("cancel", help="cancel a request; one that has ended stays as it ended")
    _add_uid(parser)
    _add_common(parser, "print the request's status as one JSON object")
    parser.set_defaults(run=_remote("cancel"))


def _add_lists(commands: Any) -> None:
    about = "list the latest requests of the proxy that answers, newest first"
    parser = commands.add_parser("list", help=about)
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument(
        "--state", choices=[state.value for state in RequestState], help="only those in this state"
    )
    _add_common(parser, "print a JSON array of statuses")
    parser.set_defaults(run=_remote("list_requests"))
    parser = commands.add_parser(
        "placement",
        help="show which instances of each stage are wanted and there, and moves",
        description="Show which instances of each stage are wanted and there, how busy they are, and which "
        "moved, move, or would move to where the load is, and why.",
    )
    _add_common(parser, "print one JSON object")
    parser.set_defaults(run=_remote("placement"))
    for verb, about in (("nodes", "list the nodes of the set"), ("workflows", "list what can be submitted")):
        parser = commands.add_parser(verb, help=about)
        _add_common(parser, "print a JSON array")
        parser.set_defaults(run=_remote(verb))
    parser = commands.add_parser("admission", help="show what the proxy lets in and refuses, and why")
    _add_common(parser, "print one JSON object")
    parser.set_defaults(run=_remote("admission"))


def _add_drain(commands: Any) -> None:
    parser = commands.add_parser(
        "drain",
        help="let a node take no new work and finish what it holds",
        description="Let a node take no new work and finish what it holds: requests of its proxy, work of "
        "its stages, outputs and results that no other node has. Then it is drained, and can be stopped, or "
        "take work again (`onepiece resume`). While no other worker has room for what it runs, it serves on, "
        "and this waits.",
    )
    parser.add_argument("node", metavar="NODE", help="its name; see `onepiece nodes`")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is drained")
    parser.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="wait no longer; the node drains on"
    )
    _add_common(parser, "print the node as one JSON object")
    parser.set_defaults(run=_remote("drain"))
    parser = commands.add_parser("resume", help="let a node that drains take work again")
    parser.add_argument("node", metavar="NODE", help="its name; see `onepiece nodes`")
    _add_common(parser, "print the node as one JSON object")
    parser.set_defaults(run=_remote("resume"))


def _add_profile(commands: Any) -> None:
    parser = commands.add_parser(
        "profile",
        help="measure what each stage of a workflow takes, into a file for `onepiece plan`",
        description="Run a workflow in this process, one stage after the other, and write down what each "
        "takes: seconds, memory, bytes, and seconds to load. A file that is there already keeps what it says "
        "of other size classes.",
    )
    parser.add_argument("workflow", metavar="MODULE:WORKFLOW", help="for example stages.echo:echo")
    parser.add_argument("-i", "--input", action="append", default=[], metavar="NAME=VALUE", help=INPUT_HELP)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the profile")
    parser.add_argument("--samples", type=int, default=5, help="runs that count (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=1, help="runs before them (default: %(default)s)")
    parser.add_argument(
        "--size-class", default="", metavar="NAME", help="what requests with these inputs are called: 480p"
    )
    parser.add_argument("--device", metavar="DEVICE", help="cuda:0, cpu:0 (default: this machine's first)")
    parser.set_defaults(run=_run_profile)


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="instances, latency and cost for a rate or a number of GPUs, from profiles",
        description="Plan from what `onepiece profile` measured: the instances of each stage for a rate, or "
        "the rate that a number of GPUs bears; beside it the same with processes that hold whole workflows. "
        "The numbers are those of a model (docs/explanation/capacity.md).",
    )
    add = parser.add_argument
    add("--profile", action="append", required=True, metavar="FILE", help="one for each workflow")
    rate = "a number, WORKFLOW=NUMBER or WORKFLOW/SIZE_CLASS=NUMBER, in requests a second; may be given again"
    add("--rate", action="append", default=[], metavar="R", help=rate)
    add("--mix", action="append", default=[], metavar="R", help="the same as shares of what --gpus bear")
    add("--gpus", type=int, metavar="N", help="no more than these; without --rate: the most they bear")
    add(
        "--p95",
        type=number_from(0, above=True),
        metavar="SECONDS",
        help="the time that 95 of 100 requests may take at most",
    )
    add("--utilisation", type=float, default=0.85, help="no stage busier than this (default: %(default)s)")
    arrivals = (
        "how gaps between requests vary: their squared coefficient of variation; 0 for equal gaps, 1 for "
        "independent clients, more for bursts (default: %(default)s)"
    )
    add("--arrivals", type=number_from(0, 1e6), default=1.0, metavar="C2", help=arrivals)
    add(
        "--gpu-memory",
        type=number_from(0, above=True),
        metavar="GIB",
        help="name what does not fit on such a GPU",
    )
    add(
        "--price",
        type=number_from(0, 1e9),
        metavar="P",
        help="of a GPU for an hour: adds the cost of 1000 requests",
    )
    what_if = (
        "compare with a change: gpus=16, rate=x2, denoise.seconds=x0.5, denoise.devices=4; may be given again"
    )
    add("--what-if", action="append", default=[], metavar="CHANGE", help=what_if)
    add("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run_plan)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what this machine has for the transports, and what would fix what is missing",
        description="Look at RDMA devices, locked memory, libraries, GPU access and shared memory.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array of findings")
    parser.set_defaults(run=_run_doctor)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure transports, a hop, what retaining costs, or a node's memory",
        description="Measure. What follows the subject goes to it: `onepiece bench transport --help`.",
    )
    parser.add_argument("subject", choices=sorted(BENCHES))
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="the subject's own arguments")
    parser.set_defaults(run=_run_bench)


def _add_uid(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("uid", metavar="UID", help="the request's UID, which `submit` prints")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="write the result here; - is standard output")
    parser.add_argument("--keep", action="store_true", help="leave the result in the store for others")
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress")


def _add_common(parser: argparse.ArgumentParser, json_help: str) -> None:
    _add_server(parser, default=argparse.SUPPRESS)  # else it would unset what stands before the verb
    parser.add_argument("--json", action="store_true", help=json_help)


def _add_server(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument(
        "--server",
        default=default,
        metavar="URL",
        help=f"a proxy of the set, or several with commas between them; wins over the variable "
        f"{SERVER_VARIABLE}, which wins over the default {DEFAULT_SERVER}; stands before or behind the verb",
    )


def _remote(command: str) -> Callable[[argparse.Namespace], int]:
    """A command that talks to a proxy; its module, and httpx with it, is imported when it runs."""

    def run(arguments: argparse.Namespace) -> int:
        remote = importlib.import_module("onepiece.cli.remote")
        arguments.server = arguments.server or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER
        code: int = asyncio.run(remote.run(getattr(remote, command), arguments))
        return code

    return run


def _run_dev(arguments: argparse.Namespace) -> int:
    if os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds texts
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - the user's module lies here, as with python -m
    dev = importlib.import_module("onepiece.cli.dev")
    asyncio.run(dev.run(arguments.workflow, http=arguments.http, listen=arguments.listen))
    return exits.OK


def _run_profile(arguments: argparse.Namespace) -> int:
    profile = importlib.import_module("onepiece.cli.profile")
    profile.run(
        arguments.workflow,
        inputs=arguments.input,
        output=arguments.output,
        samples=arguments.samples,
        warm_up=arguments.warm_up,
        size_class=arguments.size_class,
        device=arguments.device,
    )
    return exits.OK


def _run_plan(arguments: argparse.Namespace) -> int:
    plan = importlib.import_module("onepiece.cli.plan")
    plan.run(
        profiles=arguments.profile,
        rates=arguments.rate,
        mixes=arguments.mix,
        gpus=arguments.gpus,
        p95_seconds=arguments.p95,
        utilisation_max=arguments.utilisation,
        variability=arguments.arrivals,
        gpu_memory_gib=arguments.gpu_memory,
        price=arguments.price,
        what_if=arguments.what_if,
        as_json=arguments.json,
    )
    return exits.OK


def _run_doctor(arguments: argparse.Namespace) -> int:
    code: int = importlib.import_module("onepiece.cli.doctor").run(arguments)
    return code


def _run_bench(arguments: argparse.Namespace) -> int:
    bench = importlib.import_module(BENCHES[arguments.subject])
    code: int | None = bench.run(arguments.rest)
    return code or exits.OK


def _first(error: BaseException) -> BaseException:
    """The first error of a group, however deep."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _told(error: BaseException) -> str:
    """The error for a person: what it is, and what it says."""
    if isinstance(error, OnePieceError) and not isinstance(error, ConfigError):
        frame = last_frame(error)
        return f"{type(error).__name__}: {error.message}" + (f"\n  raised at {frame}" if frame else "")
    return str(error)


def _version() -> str:
    try:
        return version("onepiece")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


if __name__ == "__main__":
    sys.exit(main())
