"""Metrics of real node processes, as a scraper gets them: over HTTP, from the proxy and from each worker."""

from collections.abc import Iterator

import httpx
import pytest

from onepiece.messages import STORE
from stages.synthetic import expected_digest
from tests.acceptance.http_api import Api
from tests.acceptance.node_set import NodeProcess, NodeSet, eventually
from tests.metrics_text import Scraped

PAYLOAD_BYTES = 300_000


@pytest.fixture
def api(five: NodeSet) -> Api:
    """The seed's proxy."""
    return five.api()


def scrape(node: NodeProcess) -> Scraped:
    """What a node shows."""
    answer = httpx.get(node.metrics, trust_env=False, timeout=30.0)
    return Scraped(answer.raise_for_status().text)


@pytest.fixture
def held(api: Api) -> Iterator[str]:
    """A request that is held in its second stage, while the output of the first is retained."""
    uid = api.submit("chain", {"payload_bytes": PAYLOAD_BYTES, "seconds": [0.0, 60.0, 0.0], "steps": 6000})
    eventually(lambda: api.status(uid)["stages"]["second"] == "running", "the second stage runs")
    yield uid
    api.cancel(uid)


def test_requests_are_counted_as_they_end(five: NodeSet, api: Api) -> None:
    """What a proxy has accepted, finished, refused and failed since a moment is what was asked of it."""
    before = scrape(five.seed)
    outcome = api.run("diamond", {"payload_bytes": PAYLOAD_BYTES, "seed": 1})
    assert outcome.digest == expected_digest("diamond", PAYLOAD_BYTES, seed=1)
    api.failed(api.submit("diamond", {"failure": "raise", "failing_stage": "split"}))
    assert api.post("diamond", {"no such": 1}).status_code == 422
    assert api.post("no such workflow").status_code == 404
    after = scrape(five.seed)

    def risen(name: str, **labels: str) -> float:
        return after.sum(f"onepiece_{name}_total", **labels) - before.sum(f"onepiece_{name}_total", **labels)

    assert risen("requests_accepted", workflow="diamond") == 2
    assert risen("requests_finished", workflow="diamond") == 1
    assert risen("requests_failed", workflow="diamond", error="StageFailed") == 1
    assert risen("requests_refused", workflow="diamond", reason="InvalidInput") == 1
    assert after.sum("onepiece_requests_refused_total", workflow="", reason="UnknownWorkflow") >= 1
    assert "no such workflow" not in after.text
    assert after.sum("onepiece_set_nodes", state="alive") == len(five.nodes)


def test_each_edge_names_its_wire(five: NodeSet, api: Api) -> None:
    """Between processes of one host large payloads go through shared memory, and each node says so."""
    api.run("diamond", {"payload_bytes": PAYLOAD_BYTES, "seed": 2})
    found: dict[tuple[str, str], set[str]] = {}
    for node in five.nodes:
        for labels, _ in scrape(node).all("onepiece_edge_links"):
            edge = labels["stage"].rpartition(":")[2], labels["next_stage"].rpartition(":")[2]
            found.setdefault(edge, set()).add(f"{labels['transport']} {labels['wire']}")
    assert found["split", "left"] == found["split", "right"] == {"tcp shm"}
    assert found["left", "merge"] == found["right", "merge"] == {"tcp shm"}
    assert found["@inputs", "split"] <= {"tcp tcp", "tcp shm"}
    assert ("merge", STORE) in found


def test_retained_bytes_are_shown_with_their_bound(five: NodeSet, held: str) -> None:
    """While the next stage works its input is retained, beside the bound; a held worker counts as busy."""
    first, second = "stages.synthetic:first", "stages.synthetic:second"

    def look() -> list[Scraped] | None:
        found = [scrape(node) for node in five.workers]
        outputs = [value for each in found for _, value in each.all("onepiece_retained_outputs", stage=first)]
        return found if sum(outputs) == 1 else None

    shown = eventually(look, "nothing of earlier requests is retained any more")
    [retaining] = [each for each in shown if each.all("onepiece_retained_bytes", stage=first)]
    assert retaining.sum("onepiece_retained_bytes", stage=first, next_stage=second) >= PAYLOAD_BYTES
    assert retaining.sum("onepiece_retained_outputs", stage=first, place="memory") == 1
    assert retaining.sum("onepiece_retained_limit_bytes", place="memory") == 1 << 30
    [working] = [each for each in shown if each.all("onepiece_stage_running", stage=second)]
    assert working.sum("onepiece_stage_running", stage=second) == 1
    assert working.sum("onepiece_stage_busy_seconds_total", stage=second) > 0
    assert held not in "".join(each.text for each in shown)
