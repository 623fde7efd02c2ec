"""A small virtual machine with two Soft-RoCE devices, for tests of RDMA on machines without any.

::

    python -m tests.rdma.vm setup              once: packages (as root), kernel, initramfs
    python -m tests.rdma.vm run -- COMMAND     its output and exit status are the command's

Debian's own kernel runs under QEMU's software emulation, so the host's kernel needs nothing. The machine
sees the host's files, at the same paths, under a layer of its own: what it writes is gone afterwards. It
has no network but a pair of interfaces: rxe0 at 10.77.0.1 and rxe1 at 10.77.0.2, between which packets
really travel.
"""

import argparse
import sys
import time

from tests.rdma.vm.images import NotPossibleError, say, set_up
from tests.rdma.vm.machine import FAILED, run


def main() -> int:
    """Set up, or run a command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.rdma.vm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("setup")
    running = verbs.add_parser("run")
    running.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    running.add_argument("--processors", type=int, default=1, metavar="N")
    running.add_argument("--memory", type=int, default=2048, metavar="MIB")
    running.add_argument(
        "--counted",
        action="store_true",
        help="its clock counts instructions: for measurements on a busy host",
    )
    running.add_argument("command", nargs="+")
    options = parser.parse_args()
    try:
        if options.verb == "setup":
            began = time.monotonic()
            set_up()
            say(f"set up in {time.monotonic() - began:.0f} s")
            return 0
        return run(
            options.command,
            timeout_seconds=options.timeout,
            processors=options.processors,
            memory_mib=options.memory,
            counted=options.counted,
        )
    except NotPossibleError as error:
        say(str(error))
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
