"""The processes of ``onepiece bench hop``: each ends when its standard input does, with its parent.

``python -m onepiece.cli.bench_hop_process zmq PLACE ADDRESS`` is a stage in bare pyzmq: it prints where it
pulls from and pushes on to ADDRESS, unless it is the last one and laps are left; with ``zmq-node-loop`` it
does so on the event loop that nodes use. ``... node ARGUMENT...`` is ``python -m onepiece.node ARGUMENT...``.
"""

import asyncio
import os
import sys
import threading
from typing import Any, Final

NAME_BYTES: Final = 8
"""A message's name; one byte with the laps left follows it. A message without a name tells the last stage
where a lap begins."""


async def _push_on(place: str, onward: str) -> None:
    """Push on every message, as it came."""
    import zmq.asyncio

    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        pull.linger = push.linger = 0
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        push.connect(onward)
        print(f"tcp://127.0.0.1:{port}", flush=True)
        if place == "last":
            with context.socket(zmq.PUSH) as again:
                again.linger = 0
                await _count_laps(pull, push, again)
        while True:
            await push.send_multipart(await pull.recv_multipart(copy=False), copy=False)


async def _count_laps(pull: Any, push: Any, again: Any) -> None:
    """Send messages round again for as long as they say, and then push them on."""
    _, first = await pull.recv_multipart()
    again.connect(first.decode())
    while True:
        name, body = await pull.recv_multipart(copy=False)
        laps = name.bytes[NAME_BYTES]
        if laps:
            await again.send_multipart([name.bytes[:NAME_BYTES] + bytes([laps - 1]), body], copy=False)
        else:
            await push.send_multipart([name, body], copy=False)


def _end_with_input() -> None:
    # Not through sys.stdin: its lock, held by this thread, would trouble the interpreter's own end.
    while os.read(0, 4096):
        pass
    os._exit(0)


def main(argv: list[str]) -> int:
    """Run the process that the first argument names."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    if argv[0] == "zmq":
        asyncio.run(_push_on(argv[1], argv[2]))
        return 0
    if argv[0] == "zmq-node-loop":
        from onepiece.node.loop import run_on_node_loop

        run_on_node_loop(_push_on(argv[1], argv[2]))
        return 0
    from onepiece.node.__main__ import main as run_node

    return run_node(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
