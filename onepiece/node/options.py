"""What a node can be told: by flag, environment variable or file, in this order of precedence.

Every option has one row in ``_ROWS``; the flag, the variable (``ONEPIECE_`` and the name in capitals)
and the file's key are made from its name, so that none of the three can be forgotten.
"""

import argparse
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from onepiece.coordination import EMBEDDED, Coordination, parse_coordination
from onepiece.core.balance import RebalanceMode
from onepiece.core.fair_door import Weights
from onepiece.core.move_board import StageLimits
from onepiece.errors import ConfigError
from onepiece.ids import NODE_NAME_CHARACTERS_MAX, is_node_name
from onepiece.limits import DELIVERY_PATIENCE_SECONDS, OTHER_SETS_MAX, WEIGHT_MAX, WEIGHT_MIN
from transports import Address, TransportError
from transports.ring.layout import PAYLOAD_BYTES_MAX as INBOX_BYTES_MAX

ROLES: Final = ("worker", "proxy", "store", "manager")
_WITH_PORTS: Final = frozenset({"tcp", "ucx", "verbs"})
_MIB: Final = 1 << 20
_SIZE_MAX: Final = 4 << 40
"""What a database may be told to grow to: address space has an end, too."""
_INBOX_BYTES_MIN: Final = 4 << 10
_COUNT_MAX: Final = 1_000_000


@frozen
class NodeOptions:
    """The settings of one node."""

    roles: frozenset[str] = frozenset(ROLES)
    listen: Address = field(factory=lambda: Address("tcp", "127.0.0.1", 0))
    advertise: str | None = None
    join: tuple[Address, ...] = ()
    http: str = "127.0.0.1:0"
    metrics: str | None = None
    devices: tuple[str, ...] = ()
    lend: tuple[str, ...] = ()
    lend_idle_seconds: float = 30.0
    lend_stop_seconds: float = 5.0
    workflows: tuple[str, ...] = ()
    name: str | None = None
    state_dir: Path | None = None
    ready_file: Path | None = None
    secret: bytes | None = field(default=None, repr=False)
    insecure: bool = False
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_authority: str | None = None
    inbox_bytes: int = 128 * _MIB
    join_bytes: int = 1024 * _MIB
    store_bytes: int = 1024 * _MIB
    checkpoint_bytes: int = 1024 * _MIB
    copies: int = 2
    retain_memory_bytes: int = 1024 * _MIB
    retain_disk_bytes: int = 4096 * _MIB
    store_durability: str = "process"
    result_ttl_seconds: float = 3600.0
    request_timeout_seconds: float = 3600.0
    delivery_seconds: float = DELIVERY_PATIENCE_SECONDS
    requests_max: int = 1000
    wait_factor: float | None = None
    weights: tuple[str, ...] = ()
    other_sets: tuple[str, ...] = ()
    redirect_refused: bool = False
    body_bytes_max: int = 64 * _MIB
    workers: int = 1
    rebalance: RebalanceMode = RebalanceMode.ADVISE
    rebalance_seconds: float = 60.0
    limits: Mapping[str, StageLimits] = field(factory=dict)
    coordination: Coordination = EMBEDDED
    leader_seconds: int = 5
    heartbeat_seconds: float = 0.5
    lease_seconds: float = 6.0
    drain_seconds: float = 30.0
    log_level: str = "info"
    log_json: bool = False


@frozen
class _Row:
    name: str
    meaning: str
    read: Callable[[str], Any]
    shape: str
    many: bool = False


def _text(value: str) -> str:
    return value


def _node_name(value: str) -> str:
    if not is_node_name(value):
        raise ValueError(
            f"a node's name has up to {NODE_NAME_CHARACTERS_MAX} letters, digits, '.', '_' and '-', and "
            "begins with a letter or digit: it stands in URLs and file names"
        )
    return value


def _size(value: str) -> int:
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    unit = next((unit for unit in units if value.endswith(unit)), "")
    try:
        number = int(value.removesuffix(unit)) * units.get(unit, 1)
    except ValueError:
        raise ValueError("write a whole number of bytes, or of KiB, MiB or GiB, as 128MiB") from None
    return _within(number, 1, _SIZE_MAX)


def _inbox_size(value: str) -> int:
    return _within(_size(value), _INBOX_BYTES_MIN, INBOX_BYTES_MAX)


def _count(value: str) -> int:
    try:
        return _within(int(value), 1, _COUNT_MAX)
    except ValueError as error:
        raise ValueError(f"write a whole number: {error}") from None


def _within(number: int, least: int, most: int) -> int:
    if number <= 0:
        raise ValueError("it must be more than 0")
    if not least <= number <= most:
        raise ValueError(f"it must lie between {least} and {most}")
    return number


def _host(value: str) -> str:
    host = value.removeprefix("[").removesuffix("]")
    if not re.fullmatch(r"[A-Za-z0-9_.:%-]{1,253}", host):
        raise ValueError("write the name or the address of a host alone, as gpu-3 or 10.0.0.3")
    return host


def _seconds(value: str) -> float:
    number = float(value)
    if not 0 < number < 1e9:
        raise ValueError("it must be a positive number of seconds")
    return number


def _factor(value: str) -> float:
    number = float(value)
    if not 0 <= number < 1e9:
        raise ValueError("it must be a number from 0 on")
    return number


def _roles(value: str) -> frozenset[str]:
    roles = frozenset(part.strip() for part in value.split(",") if part.strip())
    unknown = roles - set(ROLES)
    if unknown or not roles:
        raise ValueError(f"roles are {', '.join(ROLES)}")
    return roles


def _address(value: str) -> Address:
    try:
        return Address.parse(value)
    except TransportError as error:
        raise ValueError(str(error)) from error


def _addresses(value: str) -> tuple[Address, ...]:
    addresses = tuple(_address(part.strip()) for part in value.split(",") if part.strip())
    for address in addresses:
        if address.scheme in _WITH_PORTS and not address.port:
            raise ValueError(f"{address} names no port: give the one that the node there listens on")
    return addresses


def _leader_seconds(value: str) -> int:
    number = int(value)
    if not 2 <= number <= 3600:
        raise ValueError("it must be between 2 and 3600: etcd gives no shorter lease")
    return number


def _host_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError("write host:port, for example 127.0.0.1:7080; port 0 takes a free one")
    return value


def _command(value: str) -> tuple[str, ...]:
    command = tuple(shlex.split(value))
    if not command or shutil.which(command[0]) is None:
        raise ValueError(
            "it must begin with a program that is here; no shell reads it, so write "
            "sh -c '...' around what needs one"
        )
    return command


def _flag(value: str) -> bool:
    if value.lower() not in {"true", "false", "1", "0", "yes", "no"}:
        raise ValueError("write true or false")
    return value.lower() in {"true", "1", "yes"}


def _durability(value: str) -> str:
    if value not in {"process", "power"}:
        raise ValueError("results survive the end of the process, or loss of power: write process or power")
    return value


def _level(value: str) -> str:
    if value not in {"debug", "info", "warning", "error"}:
        raise ValueError("levels are debug, info, warning, error")
    return value


def _mode(value: str) -> RebalanceMode:
    if value not in {mode.value for mode in RebalanceMode}:
        raise ValueError("write off, advise or on")
    return RebalanceMode(value)


def _limits(rows: Iterable[str]) -> dict[str, StageLimits]:
    """``module:stage=MIN..MAX`` each; either number may be missing."""
    found = {}
    for text in rows:
        match = _LIMITS.fullmatch(text)
        least, most = (int(match[2] or 1), int(match[3]) if match[3] else None) if match else (0, None)
        if match is None or least < 1 or (most is not None and most < least):
            raise ConfigError(
                f"--limits {text!r} is not usable: write MODULE:STAGE=MIN..MAX, with 1 <= MIN <= MAX; either "
                "may be left out"
            )
        found[match[1]] = StageLimits(least, most)
    return found


_LIMITS: Final = re.compile(r"([^=]+:[^=]+)=(\d{0,6})\.\.(\d{0,6})", re.ASCII)

_ROWS: Final = (
    _Row("roles", "what this node does", _roles, "worker,proxy,store,manager"),
    _Row("listen", "where other nodes reach it; port 0 takes a free one", _address, "ADDRESS"),
    _Row("advertise", "host under which others reach it (where it listens on 0.0.0.0)", _host, "HOST"),
    _Row("join", "one or more nodes of the set that have the role manager", _addresses, "ADDRESS,..."),
    _Row("http", "where clients reach its proxy", _host_port, "HOST:PORT"),
    _Row("metrics", "where its metrics are read, at /metrics; a proxy has them too", _host_port, "HOST:PORT"),
    _Row("devices", "devices of its actors (default: every GPU, else cpu:0)", _text, "cpu:0=4GiB", many=True),
    _Row("lend", "run this on each device that no actor uses, out of their way", _command, "COMMAND"),
    _Row("lend_idle_seconds", "how long a device has no actor before that", _seconds, "30"),
    _Row("lend_stop_seconds", "from SIGTERM to SIGKILL, when an actor comes", _seconds, "5"),
    _Row("workflows", "workflows the manager places", _text, "MODULE:NAME", many=True),
    _Row("name", "its name in the set (default: made from the host and process)", _node_name, "NAME"),
    _Row("state_dir", "where it keeps results and its manager's state", Path, "DIR"),
    _Row("ready_file", "a JSON file with its addresses, written once it listens", Path, "FILE"),
    _Row("secret_file", "a file with the cluster's shared secret", Path, "FILE"),
    _Row("insecure", "listen beyond this machine without a secret", _flag, "true"),
    _Row("tls_certificate", "certificate chain (PEM) for connections between nodes", _text, "FILE"),
    _Row("tls_key", "its private key (PEM)", _text, "FILE"),
    _Row("tls_authority", "certificates (PEM) that peers must be signed by", _text, "FILE"),
    _Row("inbox_bytes", "payload ring of each actor; larger messages are pulled", _inbox_size, "128MiB"),
    _Row("join_bytes", "memory for inputs that wait for their siblings", _size, "1024MiB"),
    _Row("copies", "store nodes that keep each result and each accepted request", _count, "2"),
    _Row("retain_memory_bytes", "outputs kept in memory until the next stage is done", _size, "1024MiB"),
    _Row("retain_disk_bytes", "outputs kept on disk beyond that; then stages wait", _size, "4096MiB"),
    _Row("store_bytes", "byte budget of the result store", _size, "1024MiB"),
    _Row("checkpoint_bytes", "byte budget of the checkpoints that a store node keeps", _size, "1024MiB"),
    _Row(
        "store_durability",
        "what stored results survive: the process, or loss of power",
        _durability,
        "process",
    ),
    _Row("result_ttl_seconds", "how long a result is kept", _seconds, "3600"),
    _Row("request_timeout_seconds", "deadline of requests that name none", _seconds, "3600"),
    _Row(
        "delivery_seconds",
        "how long what it sends waits where no node takes it, before its request fails",
        _seconds,
        f"{DELIVERY_PATIENCE_SECONDS:.0f}",
    ),
    _Row("requests_max", "requests in flight that its proxy accepts", _count, "1000"),
    _Row("wait_factor", "refuse what would wait this many times its own time", _factor, "0.2"),
    _Row("weights", "who gets how much of a full set", _text, "workflow:NAME=2,tenant:NAME=3", many=True),
    _Row("other_sets", "proxies of other sets, for requests refused here", _text, "URL", many=True),
    _Row("redirect_refused", "send refused requests on to another set (307)", _flag, "true"),
    _Row("body_bytes_max", "largest HTTP body", _size, "64MiB"),
    _Row("workers", "workers the manager waits for before it places anything", _count, "1"),
    _Row("rebalance", "instances move to where the load is: off, advise (only shown) or on", _mode, "advise"),
    _Row("rebalance_seconds", "shortest span of load that decides about a move", _seconds, "60"),
    _Row(
        "limits",
        "fewest and most instances of a stage, whatever the load",
        _text,
        "STAGE=MIN..MAX",
        many=True,
    ),
    _Row(
        "coordination",
        "who decides which manager leads: embedded (it is the only one), or an etcd",
        parse_coordination,
        "etcd://HOST:PORT,...",
    ),
    _Row("leader_seconds", "how long a manager leads that etcd does not hear", _leader_seconds, "5"),
    _Row("heartbeat_seconds", "time between two heartbeats", _seconds, "0.5"),
    _Row("lease_seconds", "silence after which a node is declared dead", _seconds, "6"),
    _Row("drain_seconds", "how long SIGTERM waits for running work", _seconds, "30"),
    _Row("log_level", "debug, info, warning or error", _level, "info"),
    _Row("log_json", "log lines as JSON", _flag, "true"),
)
_BY_NAME: Final = {row.name: row for row in _ROWS}


def build_parser() -> argparse.ArgumentParser:
    """The command line of ``python -m onepiece.node``."""
    parser = argparse.ArgumentParser(
        prog="python -m onepiece.node",
        allow_abbrev=False,
        description="Run one node: a process that hosts stage actors, a proxy, a result store, a manager.",
        epilog="Every option can also stand in the environment (ONEPIECE_ and its name in capitals, "
        "ONEPIECE_STATE_DIR) and in the TOML file named by --config or ONEPIECE_CONFIG (its name, "
        "state_dir). A flag wins over the environment, the environment over the file. Exit status: 0 "
        "drained and stopped, 1 failed, or stopped with work in hand, 2 unusable options, 3 an address could "
        "not be listened on, 130 stopped at once by a second signal.",
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with options")
    for row in _ROWS:
        flags = [f"--{row.name.replace('_', '-')}"]
        if row.name == "workflows":
            flags.append("--workflow")
        action = "append" if row.many else "store"
        parser.add_argument(*flags, dest=row.name, metavar=row.shape, action=action, help=row.meaning)
    return parser


def read_options(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> NodeOptions:
    """Options from flags, environment and file; raises ``ConfigError`` naming where a bad one stands."""
    flags = vars(build_parser().parse_args(argv))
    config = flags.pop("config") or environment.get("ONEPIECE_CONFIG")
    found: dict[str, Any] = {}
    for name, raw, place in (
        *_from_file(config),
        *_from_environment(environment),
        *((name, raw, f"--{name.replace('_', '-')}") for name, raw in flags.items() if raw is not None),
    ):
        found[name] = _read(name, raw, place)
    return _checked(found)


def weights_of(texts: Sequence[str]) -> Weights:
    """The weights of workflows and tenants; ``ConfigError`` names what is none."""
    found: dict[str, dict[str, float]] = {"workflow": {}, "tenant": {}}
    for text in texts:
        kind, _, rest = text.partition(":")
        name, _, number = rest.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if kind not in found or not name or not WEIGHT_MIN <= weight <= WEIGHT_MAX:
            raise ConfigError(
                f"--weights: {text!r} is not usable: write workflow:NAME=2 or tenant:NAME=3, with a number "
                f"from {WEIGHT_MIN} to {WEIGHT_MAX}"
            )
        found[kind][name] = weight
    return Weights(found["workflow"], found["tenant"])


def is_exposed(options: NodeOptions) -> bool:
    """Whether anybody in the network could speak to the node as another node does."""
    return not options.listen.is_loopback and options.secret is None and not options.insecure


def _from_file(path: str | None) -> list[tuple[str, Any, str]]:
    if path is None:
        return []
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path!r} cannot be read: {error}") from error
    unknown = sorted(content.keys() - _BY_NAME.keys())
    if unknown:
        raise ConfigError(f"{path}: unknown option {unknown[0]!r}; known are {', '.join(sorted(_BY_NAME))}")
    return [(name, raw, f"{path}: {name}") for name, raw in content.items()]


def _from_environment(environment: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    rows = ((row.name, f"ONEPIECE_{row.name.upper()}") for row in _ROWS)
    return [(name, environment[variable], variable) for name, variable in rows if variable in environment]


def _read(name: str, raw: Any, place: str) -> Any:
    row = _BY_NAME[name]
    if any(isinstance(item, str) and not item.strip() for item in (raw if isinstance(raw, list) else [raw])):
        # A variable that was not set where the command line was written, as a rule: not what was meant.
        raise ConfigError(f"{place} is empty: give a value, or leave it out")
    if row.many:
        items = raw if isinstance(raw, list) else [raw]
        return tuple(part.strip() for item in items for part in str(item).split(",") if part.strip())
    if isinstance(raw, list):
        raw = ",".join(str(part) for part in raw)
    try:
        return row.read(str(raw))
    except ValueError as error:
        raise ConfigError(f"{place}: {raw!r} is not usable: {error}") from error


def _checked(found: dict[str, Any]) -> NodeOptions:
    secret_file = found.pop("secret_file", None)
    if secret_file is not None:
        found["secret"] = _read_secret(secret_file)
    if "limits" in found:
        found["limits"] = _limits(found["limits"])
    options = NodeOptions(**found)
    if not options.join and "manager" not in options.roles:
        raise ConfigError(
            f"a node with the roles {', '.join(sorted(options.roles))} needs a manager: "
            "name one with --join, or give it the role manager"
        )
    if is_exposed(options):
        raise ConfigError(
            f"{options.listen} can be reached from other machines, and no secret is set: give every node "
            "the same --secret-file, or say --insecure true on a network you trust"
        )
    if options.lend and "worker" not in options.roles:
        raise ConfigError("--lend is for nodes with the role worker: others have no devices to lend")
    weights_of(options.weights)
    _check_tls(options)
    _check_other_sets(options.other_sets)
    if options.lease_seconds < 4 * options.heartbeat_seconds:
        raise ConfigError(
            f"--lease-seconds {options.lease_seconds} must be at least four times --heartbeat-seconds "
            f"{options.heartbeat_seconds}, else a late heartbeat kills a healthy node"
        )
    return options


def _check_other_sets(urls: Sequence[str]) -> None:
    for url in urls:
        if not url.startswith(("http://", "https://")) or url.endswith("/"):
            raise ConfigError(f"--other-sets: {url!r} is not usable: write http://host:port")
    if len(urls) > OTHER_SETS_MAX:
        raise ConfigError(f"--other-sets names {len(urls)}: give {OTHER_SETS_MAX} at most")


def _check_tls(options: NodeOptions) -> None:
    if options.tls_key is not None and options.tls_certificate is None:
        raise ConfigError("--tls-key is of no use without --tls-certificate: give both, or neither")
    for name in ("tls_certificate", "tls_key", "tls_authority"):
        path = getattr(options, name)
        try:
            if path is not None:
                Path(path).read_bytes()
        except OSError as error:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: the file {path!r} cannot be read: {error}") from error


def _read_secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"the secret file {str(path)!r} cannot be read: {error}") from error
    if len(secret) < 16:
        raise ConfigError(f"{path}: a secret has at least 16 bytes; make one with: openssl rand -hex 32")
    return secret
