"""A stage whose devices share each request, with a real ``torch.distributed`` group, on a node process."""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepiece.testing import stage_context
from stages.parallel_denoise import STEPS_MAX, WIDTH, Denoiser, denoise_alone, draw_noise
from tests.acceptance.http_api import Api
from tests.acceptance.node_set import NodeProcess, eventually, open_set
from tests.runtime.rig import children, is_alive

TOKENS, STEPS, SEED = 37, 6, 5
"""So many tokens that the ranks have shares of different sizes."""


def helpers(node: NodeProcess) -> set[int]:
    """The processes that a node has started."""
    return children(node.pid)


def under_way(api: Api) -> str:
    """A request that takes long; its UID once every rank works on it."""
    uid = api.submit_patiently("together", {"tokens": TOKENS, "steps": STEPS_MAX}, timeout_seconds=600.0)
    eventually(lambda: any(event["kind"] == "progress" for event in api.events(uid)), "it reports progress")
    return uid


async def on_one_device() -> Any:
    """The same tokens from the same stage in this process."""
    torch = pytest.importorskip("torch")
    noise = torch.from_numpy(await draw_noise.function(stage_context(), TOKENS, SEED))
    return np.asarray(await denoise_alone.function(stage_context(Denoiser.load("cpu")), noise, STEPS))


@pytest.mark.diffusion
async def test_several_devices_per_request(tmp_path: Path) -> None:
    """The result is that of one device within rounding, and the same to the bit each time.

    That a rank dies in the midst of a collective fails the request that it works on, in a moment, by the
    name of the rank; the next one runs on a new group. With the node all ranks end.
    """
    inputs = {"tokens": TOKENS, "steps": STEPS, "seed": SEED}
    with open_set(tmp_path / "set") as a_set:
        a_set.start("--roles", "proxy,manager,store", "--workflow", "stages.parallel_denoise:together")
        devices = ("--devices", "cpu:0=1GiB", "--devices", "cpu:1=1GiB")
        worker = a_set.start("--roles", "worker", "--join", a_set.seed.address, *devices)
        a_set.wait_ready()
        api = a_set.api()

        tokens = api.run("together", inputs)
        assert tokens.shape == (1, TOKENS, WIDTH)
        np.testing.assert_allclose(tokens, await on_one_device(), rtol=1e-4, atol=1e-5)
        assert np.array_equal(api.run("together", inputs), tokens)
        refused = api.failed(api.submit("together", inputs | {"steps": 0}))
        assert (refused["error"], refused["fields"]["field"]) == ("InvalidInput", "steps")

        ranks = helpers(worker)
        assert len(ranks) == 2, "the refusal has cost no rank"
        uid = under_way(api)
        os.kill(max(ranks), signal.SIGKILL)
        error = api.failed(uid)
        assert error["error"] == "StageFailed"
        assert "of 2) was killed by SIGKILL" in error["message"]
        assert np.array_equal(api.result(api.submit_patiently("together", inputs)), tokens)
        assert not any(map(is_alive, ranks))

        ranks = helpers(worker)
        uid = under_way(api)
        worker.kill()
        eventually(lambda: not any(map(is_alive, ranks)), "all ranks have ended with the node")
        api.cancel(uid)  # it would wait for another worker
