"""``python -m stages.demo``: a video from a still and a prompt, made by five node processes.

It starts the nodes, waits until every stage is loaded, submits one request, shows how it goes, writes
``clip.mp4`` and ``frames.png``, prints where the time went, and stops the nodes. Whatever happens, Ctrl-C
included, nothing of them is left behind; if something is, it says so and fails.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.table import Table

import onepiece
from onepiece.client import RequestHandle
from stages._video import contact_sheet, read_mp4
from stages._wan import SHIPPED_MODEL
from stages.demo.cluster import open_cluster
from stages.demo.view import RequestView
from stages.image_to_video import image_to_video

WORKFLOW: Final = "stages.image_to_video:image_to_video"
PROMPT: Final = "a red three moving right"
WORKERS: Final = 4
_READY_SECONDS: Final = 120.0
_REQUEST_SECONDS: Final = 300.0
_FRAMES_A_SECOND: Final = 12
_SHEET_WIDTH: Final = 1000
_INTERRUPTED: Final = 130


def main() -> int:
    """Run the demo; returns the exit status: 0, 1 if it failed, 130 after Ctrl-C."""
    arguments = _parser().parse_args()
    console = Console()
    started = time.monotonic()
    try:
        (arguments.output / "logs").mkdir(parents=True, exist_ok=True)
        left = asyncio.run(_run(arguments, console))
    except KeyboardInterrupt:
        console.print("interrupted; all nodes are stopped")
        return _INTERRUPTED
    except (onepiece.OnePieceError, OSError) as error:
        console.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        return 1
    if left:
        console.print(f"left behind: {', '.join(left)}", style="red", markup=False)
        return 1
    seconds = time.monotonic() - started
    console.print(
        f"All nodes are stopped; no process, socket or shared memory is left. {seconds:.1f} s in all."
    )
    return 0


async def _run(arguments: argparse.Namespace, console: Console) -> list[str]:
    output: Path = arguments.output
    image: bytes = arguments.image.read_bytes()
    call = image_to_video(prompt=arguments.prompt, image=image, steps=arguments.steps, seed=arguments.seed)
    async with open_cluster(output / "logs") as cluster:
        with console.status("starting") as status:
            await cluster.start(WORKERS, WORKFLOW, lambda phase: status.update(f"{phase} ..."))
            async with onepiece.connect(cluster.http) as client:
                status.update("loading the stages ...")
                await client.wait_ready(_READY_SECONDS)
                status.stop()
                console.print(
                    f"{1 + WORKERS} nodes serve image_to_video at {cluster.http}; "
                    f"importing torch and diffusers took {cluster.preload_seconds:.1f} s, once"
                )
                request = await client.submit(call, timeout=_REQUEST_SECONDS)
                video = await _follow(request, console)
        (output / "clip.mp4").write_bytes(video)
        frames = read_mp4(video)
        columns = min(len(frames), 3)
        magnify = max(1, _SHEET_WIDTH // (columns * frames.shape[2]))
        (output / "frames.png").write_bytes(contact_sheet(frames, columns=columns, magnify=magnify))
        console.print(
            f"{output / 'clip.mp4'} ({len(video)} bytes, {len(frames)} frames) and {output / 'frames.png'}"
        )
        with console.status("stopping the nodes ..."):
            return await cluster.stop()


async def _follow(request: RequestHandle[bytes], console: Console) -> bytes:
    """Show the request until it is done, print where the time went, and fetch the video."""
    view = RequestView.of([node.id for node in image_to_video.graph.nodes])

    def picture() -> Table:
        return view.progress(time.time())

    with Live(get_renderable=picture, console=console, refresh_per_second=_FRAMES_A_SECOND):
        async for event in request.events():
            view.take_in(event)
    if not console.is_terminal:
        console.line()  # on a terminal, the live picture ends its last line itself
    video = await request.result()
    console.print(view.summary())
    return video


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stages.demo", description=__doc__)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--image", type=Path, default=SHIPPED_MODEL / "example.png", help="the first frame")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, default=Path("out"), help="folder for the results (default: out)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
