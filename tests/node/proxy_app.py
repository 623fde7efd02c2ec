"""A proxy's application without a socket, with a frontend that the test drives."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from attrs import define

from onepiece import StageContext, Tensor, stage, workflow
from onepiece.node.http_testing import FakeFrontend
from onepiece.node.proxy import ProxyOptions, build_app


@stage
async def render(
    ctx: StageContext[None],
    prompt: str,
    image: bytes,
    steps: int,
    scale: float,
    tags: list[str],
    latents: Tensor | None,
) -> bytes:
    """Never runs here."""
    return image


@workflow
def movie(
    prompt: str,
    image: bytes = b"",
    steps: int = 4,
    scale: float = 1.0,
    tags: list[str] = [],  # noqa: B006 - a workflow's defaults are constants of its graph
    latents: Tensor | None = None,
) -> bytes:
    """One stage with inputs of every sort."""
    return render(prompt, image, steps, scale, tags, latents)


@define
class Proxy:
    """A proxy's frontend, and a plain HTTP client that calls its application."""

    frontend: FakeFrontend
    http: httpx.AsyncClient

    async def submit(self, **inputs: Any) -> str:
        """Submit as JSON; the UID."""
        answer = await self.http.post("/v1/requests", json={"workflow": "movie", "inputs": inputs})
        assert answer.status_code == 202, answer.text
        uid: str = answer.json()["uid"]
        return uid

    def inputs(self, answer: httpx.Response) -> Any:
        """What reached the frontend."""
        assert answer.status_code == 202, answer.text
        return self.frontend.requests_by_uid[answer.json()["uid"]].inputs


@asynccontextmanager
async def proxy(options: ProxyOptions | None = None) -> AsyncIterator[Proxy]:
    """A proxy's application."""
    frontend = FakeFrontend([movie])
    transport = httpx.ASGITransport(build_app(frontend, options))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as http:
        yield Proxy(frontend, http)


def refusal(answer: httpx.Response, status: int, error: str, *words: str) -> dict[str, Any]:
    """The error in an answer, which must be this one and say these words."""
    wire: dict[str, Any] = answer.json()
    assert (answer.status_code, wire["error"]) == (status, error), answer.text
    for word in words:
        assert word in wire["message"], wire["message"]
    return wire
