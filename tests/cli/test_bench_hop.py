"""The benchmark of a hop: its arithmetic, its arguments, and a few requests through every backend."""

import asyncio
import json
import sys

import pytest
from rich.console import Console

from onepiece.cli import bench_hop
from onepiece.cli.bench_hop import (
    CELLS,
    HOPS_MORE,
    Cell,
    Row,
    Sample,
    Samples,
    chosen_backends,
    quick_cells,
    rows_of,
    run,
    tables_of,
)
from onepiece.cli.bench_hop_backends import BACKENDS, STAGES, Chain, Reply, Seen
from onepiece.cli.bench_stages import (
    LAPS,
    arrays_through_loop,
    arrays_through_loop_laps,
    arrays_through_threads_laps,
)
from onepiece.graph import INPUTS

TINY = (Cell(64, 1, 3, 1), Cell(80 << 10, 2, 4, 1))
PEERS = ["pyzmq", "pyzmq-node-loop", "onepiece-loop", "onepiece-thread", "dask"]


def _sample(hop_us: float, p50_ms: float) -> Sample:
    return Sample(
        hop_us=hop_us,
        hop_cpu_us=2 * hop_us,
        p50_ms=p50_ms,
        p99_ms=2 * p50_ms,
        requests_per_second=1e3 / p50_ms,
        cpu_ms_per_request=p50_ms,
    )


def test_ratios_are_medians_of_paired_rounds() -> None:
    """A ratio is taken within each round first: a slow round of the machine does not move it."""
    cell = CELLS[0]
    samples: Samples = {
        ("pyzmq", cell): [_sample(10.0, 1.0), _sample(100.0, 10.0), _sample(20.0, 2.0)],
        ("other", cell): [_sample(20.0, 3.0), _sample(200.0, 30.0), _sample(80.0, 6.0)],
    }
    base, other = rows_of(samples)
    assert (other.hop_us, other.hop_ratio_to_pyzmq, other.p50_ratio_to_pyzmq) == (80.0, 2.0, 3.0)
    assert (base.hop_ratio_to_pyzmq, base.p50_ratio_to_pyzmq) == (1.0, 1.0)
    assert other.hop_us_of_rounds == (20.0, 200.0, 80.0)


def test_a_round_without_a_base_has_no_ratio() -> None:
    """A difference of medians may come out as nothing; pyzmq may not have been measured: no ratio then."""
    cell = CELLS[0]
    rows = rows_of({("pyzmq", cell): [_sample(-1.0, 1.0)], ("other", cell): [_sample(5.0, 1.0)]})
    assert [row.hop_ratio_to_pyzmq for row in rows] == [None, None]
    (alone,) = rows_of({("other", cell): [_sample(5.0, 1.0)]})
    assert alone.hop_ratio_to_pyzmq is None
    console = Console(width=200, record=True)
    for table in tables_of([alone]):
        console.print(table)
    assert "other" in console.export_text()


def test_the_longer_way_has_the_hops_that_are_divided_by() -> None:
    """The workflows differ by whole laps through the same three stages, each hop to another process."""
    graph = arrays_through_loop_laps.graph
    assert len(graph.nodes) - len(arrays_through_loop.graph.nodes) == HOPS_MORE == STAGES * (LAPS - 1)
    assert set(arrays_through_loop_laps.stages) == set(arrays_through_loop.stages)
    assert len(arrays_through_threads_laps.graph.nodes) == len(graph.nodes)
    for node in graph.nodes:
        before = [graph.node(each) for each in graph.predecessors(node.id) if each != INPUTS]
        assert all(each.stage != node.stage for each in before)


def test_quick_cells_have_a_request_for_each_slot() -> None:
    """Fewer requests, but at least two for each that is under way."""
    assert all(2 * cell.in_flight <= cell.requests for cell in quick_cells(CELLS))


def test_what_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peer that is not installed is left out with a word."""
    monkeypatch.setattr(bench_hop, "BACKENDS", {"ray": BACKENDS["ray"], "pyzmq": BACKENDS["pyzmq"]})
    monkeypatch.setattr(
        "onepiece.cli.bench_hop_backends.find_spec", lambda name: None if name == "ray" else name
    )
    assert chosen_backends(None) == ["pyzmq"]
    assert "ray is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--rounds", "0"], ["--size", "much"], ["--backend", "pigeon"], ["--fast"]])
def test_bad_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An argument that means nothing ends with status 2 and is named."""
    with pytest.raises(SystemExit) as exit_:
        run(argv)
    assert exit_.value.code == 2
    assert argv[-1] in capsys.readouterr().err


class _Wrong(Reply):
    async def close(self) -> Seen:
        return Seen(64, bytes(8), 0)


class _Confused(Chain):
    async def request(self, payload: bytearray, laps: int) -> Reply:
        return _Wrong()


def test_a_wrong_answer_ends_the_measurement() -> None:
    """What comes back is looked at: an answer to something else is no fast answer."""
    with pytest.raises(RuntimeError, match="pyzmq gave back"):
        asyncio.run(bench_hop._pass_through("pyzmq", _Confused(), bytearray(64), 7, 1))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_backend_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A few requests, small and large, one and two laps at a time, through all: every answer is right."""
    pytest.importorskip("zmq")
    pytest.importorskip("distributed")
    monkeypatch.setattr(bench_hop, "CELLS", TINY)
    chosen = [word for name in PEERS for word in ("--backend", name)]
    assert run(["--rounds", "1", "--json", *chosen]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["backend"], row["size_bytes"]) for row in rows] == [
        (name, cell.size_bytes) for cell in TINY for name in PEERS
    ]
    for row in rows:
        assert set(row) == set(Row.__annotations__)
        assert row["p50_ms"] > 0
        assert row["requests_per_second"] > 0
        assert len(row["hop_us_of_rounds"]) == 1


def test_stages_end_with_their_input() -> None:
    """A stage whose parent is gone does not stay behind."""

    async def start_and_leave() -> int | None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "onepiece.cli.bench_hop_process", "zmq", "inner", "tcp://127.0.0.1:9"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"tcp://127.0.0.1:")
        process.stdin.close()
        return await process.wait()

    pytest.importorskip("zmq")
    assert asyncio.run(start_and_leave()) == 0
