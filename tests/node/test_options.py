"""What a node is told: by flag, variable or file, which wins, and what is said of nonsense."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from onepiece.coordination import EMBEDDED, parse_coordination
from onepiece.core.move_board import StageLimits
from onepiece.errors import ConfigError
from onepiece.node import options as node_options
from onepiece.node.options import NodeOptions, build_parser, read_options
from transports import Address

LOOPBACK: Mapping[str, str] = {}


def refused(argv: list[str], environment: Mapping[str, str] = LOOPBACK) -> str:
    """The message with which these options are refused."""
    with pytest.raises(ConfigError) as caught:
        read_options(argv, environment)
    return caught.value.message


def test_defaults_need_nothing() -> None:
    """Without any option a node has all roles, on loopback, on free ports."""
    options = read_options([], {})
    assert options == NodeOptions()
    assert options.listen.is_loopback
    assert options.listen.port == 0
    assert options.roles == {"worker", "proxy", "store", "manager"}


def test_flag_wins_over_environment_over_file(tmp_path: Path) -> None:
    """For each option the flag decides, without it the variable, without that the file."""
    file = tmp_path / "node.toml"
    file.write_text('name = "file"\nlog_level = "error"\nworkers = 3\n')
    environment = {"ONEPIECE_NAME": "variable", "ONEPIECE_LOG_LEVEL": "debug"}
    found = read_options(["--config", str(file), "--name", "flag"], environment)
    assert (found.name, found.log_level, found.workers) == ("flag", "debug", 3)


def test_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    """``ONEPIECE_CONFIG`` names the file; ``--config`` wins over it."""
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text("workers = 1\n")
    two.write_text("workers = 2\n")
    assert read_options([], {"ONEPIECE_CONFIG": str(two)}).workers == 2
    assert read_options(["--config", str(one)], {"ONEPIECE_CONFIG": str(two)}).workers == 1


def test_every_option_can_be_given_in_each_way(tmp_path: Path) -> None:
    """A flag, a variable and a key are there for each option, and mean the same."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    texts = {
        "roles": "worker,manager",
        "listen": "tcp://127.0.0.1:7070",
        "join": "tcp://127.0.0.1:7071",
        "http": "127.0.0.1:7080",
        "metrics": "127.0.0.1:9100",
        "devices": "cpu:0=1GiB,cpu:1=1GiB",
        "lend": "sh -c 'sleep 1, 2'",
        "lend_idle_seconds": "1.5",
        "lend_stop_seconds": "2.5",
        "workflows": "a:b,c:d",
        "insecure": "true",
        "inbox_bytes": "1MiB",
        "join_bytes": "1MiB",
        "store_bytes": "2GiB",
        "body_bytes_max": "64KiB",
        "log_level": "error",
        "log_json": "yes",
        "secret_file": str(secret),
        "tls_certificate": str(secret),
        "tls_key": str(secret),
        "tls_authority": str(secret),
        "advertise": "gpu-3.example",
        "heartbeat_seconds": "0.25",
        "store_durability": "power",
        "rebalance": "on",
        "limits": "m:one=1..4,m:two=2..",
        "weights": "workflow:film=2",
        "other_sets": "http://b:7080",
        "redirect_refused": "yes",
        "coordination": "etcd://127.0.0.1:2379,[::1]:2379/blue",
    }
    for row in node_options._ROWS:
        text = texts.get(row.name, "7")
        beside = ["--tls-certificate", str(secret)] if row.name == "tls_key" else []
        by_flag = read_options([f"--{row.name.replace('_', '-')}", text, *beside], {})
        by_variable = read_options(beside, {f"ONEPIECE_{row.name.upper()}": text})
        file = tmp_path / "node.toml"
        file.write_text(f"{row.name} = {text!r}\n")
        by_file = read_options(["--config", str(file), *beside], {})
        assert by_flag == by_variable == by_file, row.name
        assert by_flag != NodeOptions(), row.name


def test_several_managers_to_join() -> None:
    """``--join`` takes several addresses; one that is none is named."""
    found = read_options(["--join", "tcp://a:1,tcp://b:2"], {}).join
    assert [str(address) for address in found] == ["tcp://a:1", "tcp://b:2"]
    with pytest.raises(ConfigError, match="--join: 'tcp://a:1,b' is not usable"):
        read_options(["--join", "tcp://a:1,b"], {})


@pytest.mark.parametrize("address", ["tcp://a", "ucx://a:0", "tcp://[::1]?shm=off"])
def test_an_address_to_join_has_a_port(address: str) -> None:
    """There is none that it could be by default: a node would try for ever."""
    with pytest.raises(ConfigError, match=f"--join: .*{re.escape(address[:7])}.* names no port"):
        read_options(["--join", f"tcp://b:1,{address}"], {})
    assert read_options(["--listen", address, "--insecure", "yes"], {}).listen == Address.parse(address)


def test_an_etcd_is_named_by_its_members() -> None:
    """Scheme, members and the set's name; what is written wrongly is told with an example."""
    found = parse_coordination("etcd://10.0.0.1:2379,[::1]:2380/blue")
    assert found.members == ("http://10.0.0.1:2379", "http://[::1]:2380")
    assert found.prefix == "/onepiece/blue/"
    assert parse_coordination("etcds://a:1").is_tls
    assert parse_coordination("embedded") == EMBEDDED
    for text in ("etcd://", "etcd://a", "etcd://a:0", "etcd://user:pass@a:1", "http://a:1", "etcd://a:1/x/y"):
        with pytest.raises(ValueError, match="write embedded, or etcd://host:port"):
            parse_coordination(text)


def test_lists_in_all_ways(tmp_path: Path) -> None:
    """Several workflows: a flag given twice, a list in the file, commas in a variable."""
    file = tmp_path / "node.toml"
    file.write_text('workflows = ["a:b", "c:d"]\nroles = ["worker", "manager"]\n')
    wanted = ("a:b", "c:d")
    assert read_options(["--workflow", "a:b", "--workflow", "c:d"], {}).workflows == wanted
    assert read_options([], {"ONEPIECE_WORKFLOWS": "a:b, c:d"}).workflows == wanted
    found = read_options(["--config", str(file)], {})
    assert found.workflows == wanted
    assert found.roles == {"worker", "manager"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--name", "sl/ash"], ["--name", "'sl/ash'", "letters"]),
        (["--name", "x 1/../"], ["--name", "begins with"]),
        (["--name", ""], ["--name"]),
        (["--name", ".."], ["--name"]),
        (["--name", "n\n"], ["--name"]),
        (["--name", "n" * 129], ["--name", "128"]),
        (["--roles", "worker,chef"], ["--roles", "worker, proxy, store, manager"]),
        (["--roles", ","], ["--roles"]),
        (["--roles", "worker"], ["--join", "manager"]),
        (["--roles", "proxy,store"], ["--join"]),
        (["--listen", "carrier-pigeon"], ["--listen", "carrier-pigeon"]),
        (["--listen", "tcp://127.0.0.1:99999"], ["--listen"]),
        (["--http", "nowhere"], ["--http", "host:port"]),
        (["--http", "127.0.0.1:65536"], ["--http"]),
        (["--lease-seconds", "1", "--heartbeat-seconds", "0.5"], ["--lease-seconds", "--heartbeat-seconds"]),
        (["--lease-seconds", "nan"], ["--lease-seconds"]),
        (["--drain-seconds", "-1"], ["--drain-seconds"]),
        (["--drain-seconds", "inf"], ["--drain-seconds"]),
        (["--inbox-bytes", "0"], ["--inbox-bytes", "more than 0"]),
        (["--inbox-bytes", "12 parsecs"], ["--inbox-bytes", "parsecs"]),
        (["--inbox-bytes=-1MiB"], ["--inbox-bytes"]),
        (["--lend", "no-such-program-is-here"], ["--lend", "program"]),
        (["--lend", ""], ["--lend is empty"]),
        (["--lend", "sh -c 'open"], ["--lend", "open"]),
        (["--lend", "sh", "--roles", "proxy,manager"], ["--lend", "worker"]),
        (["--store-durability", "some"], ["--store-durability", "some"]),
        (["--workers", "many"], ["--workers", "many"]),
        (["--insecure", "maybe"], ["--insecure", "true or false"]),
        (["--log-level", "loud"], ["--log-level", "debug, info, warning, error"]),
        (["--secret-file", "/nowhere/secret"], ["/nowhere/secret"]),
        (["--listen", "tcp://0.0.0.0:7070"], ["--secret-file", "--insecure"]),
        (["--config", "/nowhere/node.toml"], ["/nowhere/node.toml"]),
        (["--inbox-bytes", "1"], ["--inbox-bytes", "between 4096"]),
        (["--inbox-bytes", "5GiB"], ["--inbox-bytes", "4294967296"]),
        (["--store-bytes", "99999999999999999999"], ["--store-bytes", "between 1 and"]),
        (["--checkpoint-bytes", "5000GiB"], ["--checkpoint-bytes"]),
        (["--copies", "1MiB"], ["--copies", "a whole number"]),
        (["--copies", "x"], ["--copies", "a whole number"]),
        (["--advertise", "a b"], ["--advertise", "host alone"]),
        (["--advertise", "tcp://a:1"], ["--advertise", "host alone"]),
        (["--tls-key", "/dev/null"], ["--tls-key", "--tls-certificate"]),
        (["--tls-certificate", "/nowhere/c.pem"], ["--tls-certificate", "/nowhere/c.pem"]),
        (["--state-dir", ""], ["--state-dir is empty"]),
        (["--join", " "], ["--join is empty"]),
        (["--join", "tcp://127.0.0.1:1?shm="], ["--join", "'shm' has no value"]),
        (["--workflow", ""], ["--workflows is empty"]),
    ],
)
def test_nonsense_is_named(argv: list[str], words: list[str]) -> None:
    """The message names the option, what stands there, and what would do."""
    message = refused(argv)
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"roles = [", ["node.toml"]),
        (b"lease = 3\n", ["'lease'", "lease_seconds"]),
        (b"workers = 'many'\n", ["node.toml: workers", "many"]),
        (b"\xff\xfe", ["node.toml"]),
    ],
)
def test_bad_file_is_named(tmp_path: Path, content: bytes, words: list[str]) -> None:
    """A file that is no TOML, no text, or holds an unknown or unusable option is named with it."""
    file = tmp_path / "node.toml"
    file.write_bytes(content)
    message = refused(["--config", str(file)])
    for word in words:
        assert word in message, message


def test_empty_variable_is_named() -> None:
    """It was not set where a start script names it: neither zero, nor the current directory."""
    assert "ONEPIECE_STATE_DIR is empty" in refused([], {"ONEPIECE_STATE_DIR": ""})
    assert "ONEPIECE_WORKFLOWS is empty" in refused([], {"ONEPIECE_WORKFLOWS": " "})


def test_bad_variable_is_named() -> None:
    """The message names the variable, not the flag."""
    assert "ONEPIECE_LEASE_SECONDS" in refused([], {"ONEPIECE_LEASE_SECONDS": "soon"})


@pytest.mark.parametrize("name", ["a", "gpu-07.rack_3", "7", "N" * 128])
def test_usual_names_are_names(name: str) -> None:
    """Host names, with domains too, can be given to nodes."""
    assert read_options(["--name", name], {}).name == name


def test_other_variables_are_none_of_ours() -> None:
    """A variable that only begins like ours is left alone."""
    assert read_options([], {"ONEPIECE_": "x", "ONEPIECE_HOME": "x", "NAME": "x"}) == NodeOptions()


def test_short_secret_is_refused(tmp_path: Path) -> None:
    """A secret that could be guessed is refused, and never shown."""
    file = tmp_path / "secret"
    file.write_text("swordfish")
    message = refused(["--secret-file", str(file)])
    assert "16 bytes" in message
    assert "swordfish" not in message


def test_secret_is_in_no_text(tmp_path: Path) -> None:
    """The options can be logged: the secret is not in their text."""
    file = tmp_path / "secret"
    file.write_text("open sesame, open sesame\n")
    options = read_options(["--secret-file", str(file), "--listen", "tcp://0.0.0.0:0"], {})
    assert options.secret == b"open sesame, open sesame"
    assert "sesame" not in repr(options)


def test_flags_are_written_out() -> None:
    """A flag cut short is unknown, since a later option could make it mean another one."""
    with pytest.raises(SystemExit) as caught:
        read_options(["--lease", "3"], {})
    assert caught.value.code == 2


def test_help_names_every_option_and_the_precedence() -> None:
    """The help lists each option with its meaning and says which source wins."""
    text = " ".join(build_parser().format_help().split())
    for row in node_options._ROWS:
        assert f"--{row.name.replace('_', '-')}" in text
        assert " ".join(row.meaning.split()) in text
    assert "A flag wins over the environment, the environment over the file" in text


def test_limits_are_read_or_refused() -> None:
    """Either number may be left out; what makes no sense is told with the form."""
    limits = read_options(["--limits", "m:one=2..4,m:two=..3"], {}).limits
    assert limits == {"m:one": StageLimits(2, 4), "m:two": StageLimits(1, 3)}
    for wrong in ("m:one", "m:one=4..2", "m:one=0..2", "one=1..2"):
        with pytest.raises(ConfigError, match=r"MODULE:STAGE=MIN\.\.MAX"):
            read_options(["--limits", wrong], {})
