"""``python -m simulations COMMAND``: models of the system that are run, not read."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final

from attrs import frozen

from simulations import (
    admission_command,
    capacity_command,
    cluster_command,
    explore_command,
    resources_command,
    ring_schedules,
)
from simulations.chaos import command as chaos_command
from simulations.chaos import leaders as leaders_command
from simulations.validation import command as validate_command
from simulations.validation import shift_command


@frozen
class Command:
    """One subcommand."""

    help: str
    description: str | None
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS: Final = {
    "admission": Command(
        admission_command.HELP,
        admission_command.__doc__,
        admission_command.add_arguments,
        admission_command.run_command,
    ),
    "capacity": Command(
        capacity_command.HELP, capacity_command.__doc__, capacity_command.add_arguments, capacity_command.run
    ),
    "chaos": Command(
        chaos_command.HELP, chaos_command.__doc__, chaos_command.add_arguments, chaos_command.run
    ),
    "cluster": Command(
        cluster_command.HELP,
        cluster_command.__doc__,
        cluster_command.add_arguments,
        cluster_command.run,
    ),
    "explore": Command(
        explore_command.HELP,
        explore_command.__doc__,
        explore_command.add_arguments,
        explore_command.run,
    ),
    "leaders": Command(
        leaders_command.HELP, leaders_command.__doc__, leaders_command.add_arguments, leaders_command.run
    ),
    "resources": Command(
        resources_command.HELP,
        resources_command.__doc__,
        resources_command.add_arguments,
        resources_command.run,
    ),
    "schedules": Command(
        ring_schedules.HELP, ring_schedules.__doc__, ring_schedules.add_arguments, ring_schedules.run
    ),
    "shift": Command(
        shift_command.HELP, shift_command.__doc__, shift_command.add_arguments, shift_command.run
    ),
    "validate": Command(
        validate_command.HELP, validate_command.__doc__, validate_command.add_arguments, validate_command.run
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that is named; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m simulations", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.description)
        command.add_arguments(subparser)
    options = parser.parse_args(arguments)
    return COMMANDS[options.command].run(options)


if __name__ == "__main__":
    sys.exit(main())
