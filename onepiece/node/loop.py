"""The event loop of a node's process: uvloop's where it is installed (extra ``fast``), else asyncio's own.

Both carry the same programs; uvloop spends less of the processor between them, which is what an empty
stage's hop mostly consists of. The loops of the stages' threads are always asyncio's: stages may rely on
anything that asyncio does.
"""

import asyncio
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def run_on_node_loop(main: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a process's main coroutine, as ``asyncio.run`` does, on the loop that nodes use."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
