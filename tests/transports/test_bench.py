"""The transport benchmark: its arithmetic, its arguments, and one short run of every backend."""

import asyncio
import json

import pytest
from rich.console import Console

from onepiece.cli import bench_peers, bench_transport
from onepiece.cli.bench_backends import BACKENDS
from onepiece.cli.bench_ends import far_command
from onepiece.cli.bench_transport import METRICS, Samples, chosen_backends, rows_of, run, table_of
from transports import UnknownScheme

ROUND_TRIP, BANDWIDTH = METRICS[0], METRICS[-1]


def test_ratios_are_medians_of_paired_rounds() -> None:
    """A ratio is taken within each round first: a slow round of the machine does not move it."""
    samples: Samples = {
        ("raw-sockets", ROUND_TRIP): [10.0, 100.0, 20.0],
        ("other", ROUND_TRIP): [20.0, 200.0, 80.0],
        ("raw-sockets", BANDWIDTH): [2.0, 2.0, 2.0],
        ("other", BANDWIDTH): [1.0, 3.0, 1.0],
        ("memcpy", BANDWIDTH): [4.0, 4.0, 4.0],
    }
    rows = {(row.backend, row.metric): row for row in rows_of(samples)}
    assert rows["other", "round_trip"].median == 80.0
    assert rows["other", "round_trip"].ratio_to_raw_sockets == 2.0
    assert rows["other", "bandwidth"].ratio_to_raw_sockets == 0.5
    assert rows["raw-sockets", "bandwidth"].ratio_to_raw_sockets == 1.0
    assert rows["other", "bandwidth"].ratio_to_memcpy == 0.25
    assert rows["other", "round_trip"].ratio_to_memcpy is None
    assert (rows["other", "bandwidth"].unit, rows["other", "bandwidth"].size_bytes) == ("GB/s", 64 << 20)


def test_no_ratio_without_raw_sockets() -> None:
    """Where raw sockets were not measured there is no ratio, in the rows and in the table."""
    rows = rows_of({("other", ROUND_TRIP): [1.0, 2.0]})
    assert rows[0].ratio_to_raw_sockets is None
    console = Console(width=200, record=True, quiet=True)
    console.print(table_of(rows))


def test_backends_are_chosen_beside_raw_sockets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Raw sockets are always measured; what something is missing for is left out with a word."""
    assert chosen_backends(["ring-tcp"]) == ["raw-sockets", "ring-tcp"]

    def no_transport(scheme: str) -> None:
        raise UnknownScheme(f"no library for {scheme}")

    monkeypatch.setattr(bench_transport, "find_spec", lambda _: None)
    monkeypatch.setattr(bench_peers, "find_spec", lambda _: None)
    monkeypatch.setattr(bench_transport, "transport_for", no_transport)
    assert chosen_backends(None) == [
        name for name in BACKENDS if name not in {"pyzmq", "ring-ucx", "ring-verbs", "nixl", "mooncake"}
    ]
    said = capsys.readouterr().err
    for missing in ("pyzmq", "nixl", "mooncake"):
        assert f"{missing} is not installed" in said
    assert "no library for ucx" in said
    assert "no library for verbs" in said


def test_a_backend_that_was_named_and_is_missing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for all gets what there is; whoever names one that cannot be measured has failed."""

    async def nothing(*_: object, **__: object) -> Samples:
        return {}

    monkeypatch.setattr(bench_peers, "find_spec", lambda _: None)
    monkeypatch.setattr(bench_transport, "measure", nothing)
    assert run(["--quick"]) == 0
    assert run(["--quick", "--backend", "memcpy"]) == 0
    assert run(["--quick", "--backend", "memcpy", "--backend", "nixl"]) == 1


@pytest.mark.parametrize(
    "argv", [["--rounds", "0"], ["--rounds", "many"], ["--backend", "pigeon"], ["--fast"]]
)
def test_bad_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An argument that means nothing ends with status 2 and is named."""
    with pytest.raises(SystemExit) as exit_:
        run(argv)
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert argv[-1] in said
    assert "_positive" not in said


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_backend_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """One quick round of everything: the rows are complete and positive, and no far end stays behind."""
    assert run(["--quick", "--rounds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    measured = set(chosen_backends(None))
    assert {row["backend"] for row in rows} == measured
    bandwidths = [metric for metric in METRICS if metric.name == "bandwidth"]
    assert len(rows) == (len(measured) - 1) * len(METRICS) + len(bandwidths), "memcpy has but a bandwidth"
    for row in rows:
        assert set(row) == {
            "backend", "metric", "size_bytes", "median", "unit", "ratio_to_raw_sockets", "ratio_to_memcpy"
        }  # fmt: skip
        assert row["median"] > 0
        assert row["ratio_to_raw_sockets"] > 0
        assert (row["ratio_to_memcpy"] is None) is (row["metric"] != "bandwidth")


def test_far_ends_end_with_their_input() -> None:
    """A far end whose parent is gone does not stay behind."""

    async def start_and_leave() -> int | None:
        process = await asyncio.create_subprocess_exec(
            *far_command("raw-sockets"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert int(await process.stdout.readline()) > 0
        process.stdin.close()
        return await process.wait()

    assert asyncio.run(start_and_leave()) == 0
