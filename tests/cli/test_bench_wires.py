"""The ring beside a wire's own programs: what is read of their tables, ratios, arguments, one short run."""

import io
import ipaddress
import json
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from onepiece.cli import bench_programs, bench_wires
from onepiece.cli.bench_programs import (
    Program,
    ProgramError,
    bandwidth_of,
    latency_of,
    output_of,
    put_bandwidth,
    put_bandwidth_of,
    put_latency_of,
    write_bandwidth,
)
from onepiece.cli.bench_wires import MEASURES, Samples, chosen_devices, rows_of, run, table_of
from transports import UnknownScheme, transport_for
from transports.verbs_devices import Device, Gid, Port

WRITE_BW = """
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : rxe1
 local address: LID 0000 QPN 0x0011 PSN 0x2ba1a7 RKey 0x0002ff VAddr 0x007f1d5a5bb000
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 1048576    16             18.10              17.42                0.000017
---------------------------------------------------------------------------------------
"""
WRITE_LAT = """
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99%
 64      1000          401.22         9120.01      512.50             601.10         33.1            1002.2
"""
PUT_BW = """
+--------------+--------------+------------------------------+---------------------+-----------------------+
|    Stage     | # iterations | 50.0%ile | average | overall |  average |  overall |  average  |  overall  |
+--------------+--------------+----------+---------+---------+----------+----------+-----------+-----------+
Final:                    100      0.130  2312.5    2401.0     6919.2    6664.3         432         416
"""


UNLABELLED = """
                          80  66088.630       inf 113400.149        0.00     141.09           0           9
"""


def test_the_programs_tables_are_read() -> None:
    """The averages of bandwidths, in GB/s though they print MiB; the typical and the overall latency."""
    assert bandwidth_of(WRITE_BW, 1 << 20) == pytest.approx(17.42 * (1 << 20) / 1e9)
    assert latency_of(WRITE_LAT, 64) == 512.5
    assert put_bandwidth_of(PUT_BW, 1 << 24) == pytest.approx(6664.3 * (1 << 20) / 1e9)
    assert put_latency_of(PUT_BW, 64) == 2401.0
    assert put_bandwidth_of(UNLABELLED, 1 << 24) == pytest.approx(141.09 * (1 << 20) / 1e9)


@pytest.mark.parametrize("text", ["", "Unable to init the socket connection", "Final: 100 0.1", "1048576 5"])
def test_what_is_no_table_is_shown(text: str) -> None:
    """A program that printed something else is not read as a number: the error shows what it printed."""
    for read in (bandwidth_of, latency_of, put_bandwidth_of, put_latency_of):
        with pytest.raises(ProgramError) as error:
            read(text, 1 << 20)
        assert text in str(error.value)


def test_ratios_are_medians_of_paired_rounds() -> None:
    """A ratio is taken within each round first: a slow round of the machine does not move it."""
    samples: Samples = {MEASURES[-1]: [(8.0, 10.0), (1.0, 1.0), (9.0, 10.0)]}
    (row,) = rows_of(samples)
    assert (row.ring, row.program, row.ratio, row.ratios) == (8.0, 10.0, 0.9, (0.8, 1.0, 0.9))
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table_of("verbs", [row]))
    assert "0.80 0.90 1.00" in console.export_text()


def test_devices_are_chosen() -> None:
    """As named; else packets leave by the last active device and arrive at the first one."""

    def device(name: str, state: str) -> Device:
        gid = Gid(0, ipaddress.IPv6Address("fe80::1"), "RoCE v2")
        return Device(name, (Port(1, "Ethernet", state, "100 Gb/sec", (gid,)),))

    both = [device("rxe0", "ACTIVE"), device("off", "DOWN"), device("rxe1", "ACTIVE")]
    assert chosen_devices(both, None, None) == ("rxe1", "rxe0")
    assert chosen_devices(both, "rxe0", None) == ("rxe0", "rxe0")
    assert chosen_devices(both, None, "off") == ("rxe1", "off")
    with pytest.raises(ProgramError, match="no RDMA device"):
        chosen_devices([device("off", "DOWN")], None, None)


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no such program, the error says what to install."""
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(bench_programs, "find_spec", lambda _: None)
    with pytest.raises(ProgramError, match="apt-get install perftest"):
        write_bandwidth("rxe0", "rxe1", 64, 5)
    with pytest.raises(ProgramError, match="onepiece\\[ucx\\]"):
        put_bandwidth({}, 64, 5)


FAKE = """
import pathlib, sys, time
server, note = sys.argv[1] == "server", pathlib.Path(sys.argv[3])
if server:
    time.sleep(600)
tries = len(note.read_text()) if note.exists() else 0
note.write_text("x" * (tries + 1))
print("port", int(sys.argv[2]) > 0, "try", tries)
sys.exit(tries < 2)
"""


async def test_clients_knock_until_the_server_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that finds no server yet is started again; the server ends with the client."""
    script = tmp_path / "program.py"
    script.write_text(FAKE)
    said = (str(script), "server", "PORT", str(tmp_path / "note"))
    program = Program((sys.executable, *said), (sys.executable, said[0], "client", *said[2:]), {})
    assert (await output_of(program)).split() == ["port", "True", "try", "2"]
    (tmp_path / "note").unlink()
    monkeypatch.setattr(bench_programs, "_KNOCK_SECONDS", 0.0)
    with pytest.raises(ProgramError, match="try 0"):
        await output_of(program)


def test_what_cannot_be_measured_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device the command says so and ends with status 1; an unknown wire with status 2."""
    monkeypatch.setattr(bench_wires, "devices_of", lambda: ())
    assert run(["verbs"]) == 1
    assert "onepiece doctor" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        run(["pigeon"])
    assert exit_.value.code == 2


def test_the_ring_and_ucx_run_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    """One quick round over shared memory: every row is positive, and the environment is as before."""
    try:
        transport_for("ucx")
        put_bandwidth({}, 64, 5)
    except (UnknownScheme, ProgramError) as missing:
        pytest.skip(str(missing))
    before = dict(os.environ)
    assert run(["ucx-shm", "--quick", "--rounds", "1", "--json"]) == 0
    assert dict(os.environ) == before
    said = json.loads(capsys.readouterr().out)
    assert (said["wire"], said["rounds"]) == ("ucx-shm", 1)
    assert [row["measure"] for row in said["rows"]] == [measure.label for measure in MEASURES]
    for row in said["rows"]:
        assert row["ring"] > 0
        assert row["program"] > 0
        assert row["ratio"] == pytest.approx(row["ring"] / row["program"])
