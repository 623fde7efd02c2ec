"""The check that fences hold: what a node declared dead writes lands nowhere that knows of its death.

A node that was stopped or cut off and is declared dead may come back and go on. Whoever has learnt of its
death refuses that *life* of it: from then on, but for the time that a fence takes, nothing that is written
under its name may land in a ring.
"""

from collections.abc import Iterable
from typing import Final

from onepiece.node.node import Node
from simulations.loop import Process, VirtualLoop
from simulations.sim_trace import Trace
from transports.introductions import Hello

FENCE_SECONDS: Final = 2.0
"""Until when a fence must be up."""


class Fences:
    """Watches all rings of a run."""

    def __init__(self, loop: VirtualLoop, trace: Trace) -> None:
        self._loop = loop
        self._trace = trace
        self._refused: dict[Process, dict[str, float]] = {}
        """When each process has learnt of the death of which lives."""

    def watch(self, process: Process, node: Node) -> None:
        """Note what this node refuses from now on."""
        refused = self._refused.setdefault(process, {})
        refuse = node.env.inboxes.refuse

        def observed(lives: Iterable[str]) -> None:
            lives = list(lives)
            for life in lives:
                refused.setdefault(life, self._loop.now)
            refuse(lives)

        node.env.inboxes.refuse = observed  # type: ignore[method-assign]  # it is watched, and done as before

    def check(self, process: Process, hello: bytes) -> None:
        """Something was written into a process's memory by whoever said this hello."""
        refused = self._refused.get(process)
        if not refused:
            return
        life = Hello.from_bytes(hello).identity
        since = refused.get(life)
        if since is not None and self._loop.now > max(since, process.resumed_at) + FENCE_SECONDS:
            self._trace.fail(f"{life} writes to {process.name}, which knows of its death since {since:.4f}")
