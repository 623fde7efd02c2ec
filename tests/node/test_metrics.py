"""What nodes show to whoever scrapes them: read from the living objects, bounded, and whole."""

import asyncio
import socket
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from onepiece import Cpu, StageContext, stage, workflow
from onepiece import metrics as onepiece_metrics
from onepiece.core.admission import LATE
from onepiece.core.inventory import ActorReport, ActorState, Device, DeviceKind
from onepiece.errors import InvalidInput, OnePieceError, Overloaded, UnknownWorkflow
from onepiece.graph import INPUTS
from onepiece.messages import STORE
from onepiece.metrics import Distribution, Metric, MetricKind, Metrics, Sample
from onepiece.node.actor_host import ActorHost
from onepiece.node.node import Node, open_node
from onepiece.node.options import NodeOptions
from onepiece.node.proxy_service import ProxyService
from onepiece.node.readings.actors import devices
from onepiece.node.readings.channels import wire_of
from onepiece.node.readings.delivery import Edge, edges_from
from onepiece.node.request_counts import RefusalCounts, RequestCounts, worked_seconds
from onepiece.node.stopping import StopSignal
from onepiece.requests import EventKind, RequestEvent, RequestState
from onepiece.runtime.link_view import LinkView
from stages.synthetic import diamond
from tests.metrics_text import Scraped
from tests.node import waiting_stages
from tests.node.in_process import ended, open_nodes, proxy_of
from tests.node.proxy_set import until
from transports import ListenFailed

SECRET = b"0123456789abcdef"
PRIVATE = "a private prompt"
SLOW = "tests.node.waiting_stages:slow"
GAUGE = Metric("onepiece_depth", MetricKind.GAUGE, "how deep", ("what",))
COUNTER = Metric("onepiece_drops_total", MetricKind.COUNTER, "how many", ("what",))
HISTOGRAM = Metric("onepiece_wait_seconds", MetricKind.HISTOGRAM, "how long", ("what",))


async def scraped(*samples: Sample) -> Scraped:
    """What a node with these samples shows."""
    metrics = Metrics()

    async def source() -> Iterable[Sample]:
        return samples

    metrics.read_from("test", source)
    return Scraped((await metrics.exposition()).decode())


async def scrape(url: str | None) -> Scraped:
    """What a node shows over HTTP."""
    assert url is not None
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.get(url)
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return Scraped(answer.raise_for_status().text)


async def test_samples_of_one_kind_are_added_up() -> None:
    """Two samples with the same labels are one series, as a scraper refuses a series that comes twice."""
    found = await scraped(GAUGE.of(2, "a"), GAUGE.of(3, "a"), GAUGE.of(1, "b"), COUNTER.of(7, "a"))
    assert found.sum("onepiece_depth", what="a") == 5
    assert found.sum("onepiece_depth", what="b") == 1
    assert found.sum("onepiece_drops_total") == 7


@pytest.mark.parametrize("label", ['say "hi"', "two\nlines", "back\\slash", "", "ü"])
async def test_any_label_survives(label: str) -> None:
    """Whatever a device or a workflow is called, the text stays one that can be parsed."""
    assert (await scraped(GAUGE.of(1, label))).label_values() >= {label}


async def test_distributions_count_from_below() -> None:
    """A bucket holds all that is at most its bound; the last one holds all."""
    seconds = Distribution((1.0, 10.0))
    for value in (0.5, 1.0, 5.0, 50.0):
        seconds.note(value)
    found = await scraped(HISTOGRAM.of(seconds, "a"))
    buckets = {labels["le"]: value for labels, value in found.all("onepiece_wait_seconds_bucket")}
    assert buckets == {"1.0": 2, "10.0": 3, "+Inf": 4}
    assert found.sum("onepiece_wait_seconds_count") == seconds.count == 4
    assert found.sum("onepiece_wait_seconds_sum") == 56.5


async def test_a_part_that_fails_or_hangs_is_said_and_the_others_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scrape shows what it can, says what it cannot, and takes a bounded time."""
    monkeypatch.setattr(onepiece_metrics, "SOURCE_SECONDS", 0.01)
    metrics = Metrics()

    async def sound() -> Iterable[Sample]:
        return [GAUGE.of(1, "a")]

    async def broken() -> Iterable[Sample]:
        raise ValueError("a bug")

    async def hanging() -> Iterable[Sample]:
        await asyncio.Event().wait()
        return []

    for name, source in (("broken", broken), ("hanging", hanging), ("sound", sound)):
        metrics.read_from(name, source)
    found = Scraped((await metrics.exposition()).decode())
    parts = {labels["part"]: value for labels, value in found.all("onepiece_scrape_success")}
    assert parts == {"broken": 0, "hanging": 0, "sound": 1}
    assert found.sum("onepiece_depth") == 1


@pytest.mark.parametrize(
    ("address", "wire", "shown"),
    [
        ("tcp://10.0.0.2:7070/actor/7", "tcp", ("tcp", "tcp")),
        ("tcp://10.0.0.2:7070/actor/7", "tcp (shm from the first large payload on)", ("tcp", "tcp")),
        ("tcp://10.0.0.2:7070/actor/7", "shm (beside tls)", ("tcp", "shm")),
        ("ucx://10.0.0.2:7070/store?require=shm", "shm (sysv/memory)", ("ucx", "shm")),
        ("verbs://[::1]:7070/control", "rdma (mlx5_0 port 1, gid 3 of many)", ("verbs", "rdma")),
    ],
)
def test_wires_have_few_names(address: str, wire: str, shown: tuple[str, str]) -> None:
    """Transport and kind of the wire; neither adapters nor reasons become labels."""
    assert wire_of(LinkView(address, wire, 0, 0, 0)) == shown


def test_edges_of_a_workflow() -> None:
    """From the inputs over forks and joins to the store; those of other stages are another node's."""
    stages = {node.id: node.stage for node in diamond.graph.nodes}
    everywhere = edges_from([diamond.graph], {*stages.values(), INPUTS})
    assert {(edge.stage, edge.next_stage) for edge in everywhere} == {
        (INPUTS, stages["split"]),
        (stages["split"], stages["left"]),
        (stages["split"], stages["right"]),
        (stages["left"], stages["merge"]),
        (stages["right"], stages["merge"]),
        (stages["merge"], STORE),
    }
    assert edges_from([diamond.graph], {stages["merge"]}) == {Edge(stages["merge"], STORE, is_retained=True)}


@stage(resources=Cpu(memory_gib=3))
async def heavy(ctx: StageContext[None], text: str) -> str:
    """Says that it needs much."""
    return text


@workflow
def weigh(text: str) -> str:
    """It alone."""
    return heavy(text)


async def test_memory_that_is_promised_of_a_device() -> None:
    """What the stages on it say that they need, two actors twice, beside what there is; 0 where none is."""

    class Host:
        def loads(self) -> list[tuple[ActorReport, None]]:
            key = next(iter(weigh.graph.stages))
            return [(ActorReport(number, key, ("cpu:0",), ActorState.READY), None) for number in (1, 2)]

    known = [Device(f"cpu:{number}", DeviceKind.CPU, 8 << 30) for number in (0, 1)]
    env: Any = SimpleNamespace(routes=SimpleNamespace(graphs={"weigh": weigh.graph}))
    host: Any = Host()
    found = await scraped(*devices(env, host, known))
    shown = {labels["device"]: value for labels, value in found.all("onepiece_device_memory_declared_bytes")}
    assert shown == {"cpu:0": 6 << 30, "cpu:1": 0}
    assert found.sum("onepiece_device_memory_limit_bytes") == 16 << 30


def told(kind: EventKind, at: float, stage: str | None = None, **detail: str) -> RequestEvent:
    """An event of a request."""
    return RequestEvent("uid", 0, kind, at, stage=stage, detail=detail)


def test_work_for_a_request_that_failed_is_wasted() -> None:
    """What its stages did until its end counts, one that ran twice counts twice, one that waits does not."""
    events = [
        told(EventKind.STAGE_STARTED, 10.0, "one"),
        told(EventKind.STAGE_FINISHED, 14.0, "one"),
        told(EventKind.STAGE_STARTED, 20.0, "one"),
        told(EventKind.STAGE_FINISHED, 23.0, "one"),
        told(EventKind.QUEUED, 23.0, "two"),
        told(EventKind.STAGE_STARTED, 30.0, "three"),
        told(EventKind.STAGE_STARTED, 90.0, "of a clock that is ahead"),
        told(EventKind.FAILED, 40.0, error="DeadlineExceeded"),
    ]
    assert worked_seconds(events, 40.0) == 4 + 3 + 10
    counts = RequestCounts()
    counts.note_end("film", 5.0, events)
    assert counts.failed == {("film", "DeadlineExceeded"): 1}
    assert counts.wasted_seconds == {("film", "DeadlineExceeded"): 17.0}


def test_ends_that_somebody_made_up_are_one() -> None:
    """An error that came from elsewhere under a name of its own is counted under a known one."""
    counts = RequestCounts()
    for name in ("Evil1", "Evil2"):
        counts.note_end("film", 0.0, [told(EventKind.FAILED, 1.0, error=name)])
    assert counts.failed == {("film", "OnePieceError"): 2}


def test_refusals_name_no_workflow_that_is_not_registered() -> None:
    """Clients may ask for any: these are counted together."""
    counts = RefusalCounts()
    for error in (
        UnknownWorkflow("no", workflow="made up"),
        UnknownWorkflow("no", workflow="made up, too"),
        InvalidInput("no", workflow="film", field="x"),
        Overloaded("no", workflow="film", reason=LATE),
        Overloaded("no", workflow="film", reason="invented"),
        OnePieceError("no", workflow=["film"]),
    ):
        counts.note(error, {"film": 1})
    assert counts.by_reason == {
        ("", "UnknownWorkflow"): 2,
        ("film", "InvalidInput"): 1,
        ("film", LATE): 1,
        ("film", "Overloaded"): 1,
        ("", "OnePieceError"): 1,
    }


# --- nodes -------------------------------------------------------------------------------------


def host_of(node: Node) -> ActorHost:
    """The actors of a worker."""
    assert node.host is not None
    return node.host


async def finish(node: Node, uid: str) -> RequestState:
    """Let a request that waits for its steps finish."""
    for _ in range(waiting_stages.STEPS):
        waiting_stages.may_step.release()
    return (await ended(proxy_of(node), uid)).state


def has_begun(proxy: ProxyService, uid: str) -> bool:
    """Whether the owner has heard that a stage works on a request: that is told a moment late."""
    return any(event.kind is EventKind.STAGE_STARTED for event in proxy.owner.table.events(uid, -1))


async def test_a_stage_at_work(tmp_path: Path) -> None:
    """What runs and waits is seen while it does; afterwards what it came to, and what was for nobody."""
    waiting_stages.reset()
    where = "127.0.0.1:0"
    opening = open_nodes(
        "tests.node.waiting_stages:film", directory=tmp_path, workers=1, metrics=where, secret=SECRET
    )
    async with opening as (seed, worker):
        proxy = proxy_of(seed)
        first = await proxy.submit("film", {"name": PRIVATE}, timeout_seconds=60.0, key=None)
        await until(lambda: PRIVATE in waiting_stages.running)
        second = await proxy.submit("film", {"name": "two"}, timeout_seconds=60.0, key=None)
        third = await proxy.submit("film", {"name": "three"}, timeout_seconds=60.0, key=None)
        host = host_of(worker)
        await until(lambda: [report.queued for report in host.reports() if report.stage == SLOW] == [2])

        found = await scrape(worker.metrics)
        assert found.sum("onepiece_stage_running", stage=SLOW) == 1
        assert found.sum("onepiece_stage_queued", stage=SLOW) == 2
        assert found.sum("onepiece_stage_oldest_wait_seconds", stage=SLOW) > 0
        assert found.sum("onepiece_stage_busy_seconds_total", stage=SLOW) > 0, "it runs and is not busy"
        assert found.sum("onepiece_stage_runs_total", stage=SLOW) == 0
        assert found.sum("onepiece_retained_bytes") == 0
        assert found.sum("onepiece_retained_limit_bytes", place="memory") == 1 << 30
        at_proxy = await scrape(seed.metrics)
        assert at_proxy.sum("onepiece_requests_in_flight", workflow="film") == 3

        await until(lambda: has_begun(proxy, first.uid))
        await proxy.cancel(first.uid)
        await proxy.cancel(third.uid)
        assert await finish(seed, second.uid) is RequestState.FINISHED
        await until(lambda: host.is_idle)
        found = await scrape(worker.metrics)
        assert found.sum("onepiece_stage_runs_total", stage=SLOW) == 1
        wasted = found.sum("onepiece_stage_wasted_seconds_total", stage=SLOW, error="RequestCancelled")
        assert 0 < wasted < found.sum("onepiece_stage_busy_seconds_total", stage=SLOW)
        assert found.sum("onepiece_stage_tasks_dropped_total", stage=SLOW, error="RequestCancelled") == 1
        edges = {(labels["stage"], labels["next_stage"]) for labels, _ in found.all("onepiece_edge_links")}
        assert edges == {(SLOW, SLOW.replace("slow", "shown")), (SLOW.replace("slow", "shown"), STORE)}

        at_proxy = await scrape(f"{seed.http}/metrics")
        assert at_proxy.sum("onepiece_requests_accepted_total", workflow="film") == 3
        assert at_proxy.sum("onepiece_requests_finished_total", workflow="film") == 1
        assert at_proxy.sum("onepiece_requests_cancelled_total", workflow="film") == 2
        assert at_proxy.sum("onepiece_request_seconds_count", workflow="film") == 1
        assert at_proxy.sum("onepiece_request_wasted_seconds_total", error="RequestCancelled") > 0
        assert at_proxy.sum("onepiece_requests_in_flight", workflow="film") == 0
        assert at_proxy.sum("onepiece_store_entries", store="results", kind="value") == 1
        assert at_proxy.sum("onepiece_set_nodes", state="alive") == 2
        for scrape_ in (found, at_proxy):
            assert scrape_.sum("onepiece_scrape_success") == len(scrape_.all("onepiece_scrape_success"))
            assert not {first.uid, second.uid, third.uid} & scrape_.label_values()
            assert not any(text in scrape_.text for text in (PRIVATE, SECRET.decode(), first.uid))


async def test_counters_outlive_actors_and_lives(tmp_path: Path) -> None:
    """A node that was declared dead begins anew, with other actors; its counters go on."""
    waiting_stages.reset()
    opening = open_nodes(
        "tests.node.waiting_stages:film", directory=tmp_path, workers=1, metrics="127.0.0.1:0"
    )
    async with opening as (seed, worker):
        proxy = proxy_of(seed)
        accepted = await proxy.submit("film", {"name": "one"}, timeout_seconds=60.0, key=None)
        assert await finish(seed, accepted.uid) is RequestState.FINISHED
        before = await scrape(worker.metrics)
        worker.member._begin_new_life()
        incarnation = before.sum("onepiece_node_incarnation")
        await until(lambda: worker.member.info.incarnation > incarnation)
        await until(lambda: len(host_of(worker).reports()) == 2)
        after = await scrape(worker.metrics)
        for name in ("onepiece_stage_runs_total", "onepiece_stage_busy_seconds_total"):
            assert after.sum(name, stage=SLOW) == before.sum(name, stage=SLOW) > 0


async def test_a_port_in_use_is_named_with_its_option(tmp_path: Path) -> None:
    """Whoever starts a node reads which of its two HTTP addresses is taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BaseExceptionGroup) as caught:
            async with open_node(NodeOptions(state_dir=tmp_path, metrics=place), StopSignal()):
                pass
    assert caught.group_contains(ListenFailed, match=f"--metrics: .*{place.rpartition(':')[2]}")
