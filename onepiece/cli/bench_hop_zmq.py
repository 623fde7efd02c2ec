"""A stage of ``onepiece bench hop`` in bare pyzmq: a process that pushes on what it pulls.

``python -m onepiece.cli.bench_hop_zmq ADDRESS`` prints where it pulls from and pushes to ADDRESS, until
its standard input ends.
"""

import asyncio
import os
import sys
import threading


async def serve(onward: str) -> None:
    """Push on every message, as it came."""
    import zmq.asyncio

    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        pull.linger = push.linger = 0
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        push.connect(onward)
        print(f"tcp://127.0.0.1:{port}", flush=True)
        while True:
            await push.send_multipart(await pull.recv_multipart(copy=False), copy=False)


def _end_with_input() -> None:
    # Not through sys.stdin: its lock, held by this thread, would trouble the interpreter's own end.
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_input, daemon=True).start()
    asyncio.run(serve(sys.argv[1]))
