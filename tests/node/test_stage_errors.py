"""A node whose stages fail in the worst ways: their requests end with it, and the next ones work."""

from pathlib import Path

import httpx
import pytest

from tests.node.in_process import open_nodes, proxy_of, run
from tests.runtime.failing_stages import FAULTS

SECONDS = 40.0


@pytest.mark.timeout(90)
@pytest.mark.parametrize("flow", ["thread_flow", "process_flow"])
async def test_the_next_request_works(flow: str, tmp_path: Path) -> None:
    """And the proxy tells of each of them, and lists them."""
    async with (
        open_nodes(f"tests.runtime.failing_stages:{flow}", directory=tmp_path, workers=1) as nodes,
        httpx.AsyncClient(base_url=str(nodes[0].http), timeout=SECONDS) as client,
    ):
        proxy = proxy_of(nodes[0])
        for fault in [*FAULTS, "value", "report", "report much"]:
            failed = await run(proxy, flow, {"fault": fault}, SECONDS)
            assert failed in {"StageFailed", "InvalidInput", "NotReady"}, fault
            assert await run(proxy, flow, {"fault": "none"}, SECONDS) == 1
        listed = await client.get("/v1/requests", params={"limit": 100})
        assert listed.status_code == 200
        for request in listed.json()["requests"]:
            uid = request["uid"]
            assert (await client.get(f"/v1/requests/{uid}")).status_code == 200
            events = await client.get(f"/v1/requests/{uid}/events")
            assert "event: failed" in events.text or "event: finished" in events.text
            await client.get(f"/v1/requests/{uid}/result", headers={"accept": "application/json"})
