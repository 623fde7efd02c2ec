"""The small parts: addresses, introductions, registry, driver, memory, endings, background tasks."""

import asyncio
import math
import random
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from transports import registry
from transports.address import Address
from transports.background import Background
from transports.driver import RegionRun, pause_seconds, run_on_region
from transports.errors import (
    AddressError,
    ConnectFailed,
    HandshakeRefused,
    LayoutMismatch,
    ListenFailed,
    PeerLost,
    ProtocolError,
    SessionFenced,
    UnknownScheme,
)
from transports.introductions import IDENTITY_BYTES_MAX, Hello, Welcome
from transports.local import LocalTransport
from transports.memory import Accepted, Listener, Options, Region
from transports.operations import Fence, Load, Pause, PauseReason, Program, Read, Store
from transports.region_memory import RegionMemory
from transports.ring import Geometry
from transports.sessions import Ending
from transports.tcp import TcpTransport


@pytest.mark.parametrize(
    "text",
    [
        "tcp://127.0.0.1:7070",
        "tcp://127.0.0.1:7070/control",
        "tcp://[::1]:7070/actor/7",
        "local://house/actor/7",
        "ucx://host:1/x?device=mlx5",
        "tcp://host:0/a%20name",
    ],
)
def test_addresses_come_back(text: str) -> None:
    """What an address prints is what it was read from."""
    address = Address.parse(text)
    assert str(address) == text
    assert Address.parse(str(address)) == address
    assert str(address.region("other")).partition("/other")[0] in text


def test_names_can_be_appended() -> None:
    """A name stands for the region wherever it was appended, before the options or behind them."""
    wanted = Address("ucx", "host", 1, "actor/7", {"require": "shm", "path": "/a/b"})
    assert Address.parse(str(wanted.region("")) + "/actor/7") == wanted
    assert Address.parse(str(wanted)) == wanted


@pytest.mark.parametrize(
    "text",
    ["", "7070", "127.0.0.1:7070", "tcp://", "tcp://:7070", "tcp://h:port", "tcp://h:99999", "tcp://u@h:1"],
)
def test_unreadable_addresses_show_the_form(text: str) -> None:
    """An address that cannot be read is shown, with the form that was expected."""
    with pytest.raises(AddressError, match="expected scheme://host:port"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ("require=", "'require' has no value"),
        ("require", "'require' has no value"),
        ("shm=off&fast", "'fast' has no value"),
        ("require=rdma&require=shm", "'require' is given twice"),
        ("require=rdma&require=rdma/actor/7", "'require' is given twice"),
    ],
)
def test_options_say_one_thing(query: str, what: str) -> None:
    """An option without a value, or with two, is an error: nobody could be sure what was meant."""
    with pytest.raises(AddressError, match=what):
        Address.parse(f"ucx://host:1?{query}")


async def test_no_option_means_anything_to_local() -> None:
    """What other transports know is as unknown to ``local`` as anything else, on either side."""
    address = Address.parse("local://house?shm=off")
    with pytest.raises(AddressError, match="local has no options"):
        LocalTransport().listen(address, Options())
    with pytest.raises(AddressError, match="local has no options"):
        await LocalTransport().connect(address, b"", Options())


@pytest.mark.parametrize("host", ["a..b", "a" * 64, ".", "\0"])
async def test_no_host_of_this_name_is_an_error_of_transports(host: str) -> None:
    """A host's name that no resolver takes fails as one that it does not know."""
    address = Address("tcp", host, 7070, "actor/7")
    with pytest.raises(ListenFailed, match="cannot listen on"):
        async with TcpTransport().listen(address, Options()):
            pass
    with pytest.raises(ConnectFailed, match="cannot connect to"):
        await TcpTransport().connect(address, b"", Options())


async def test_no_thread_to_look_a_host_up_in_is_an_error_of_transports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that may start no thread cannot ask the resolver; that is said as of any other host."""

    async def no_thread(*_: object, **__: object) -> object:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", no_thread)
    with pytest.raises(ConnectFailed, match="can't start new thread"):
        await TcpTransport().connect(Address("tcp", "127.0.0.1", 1, "x"), b"", Options())


@pytest.mark.parametrize("text", ["local://vast", "tcp://127.0.0.1:0", "tcp://127.0.0.1:0?shm=off"])
async def test_no_memory_for_a_region_is_an_error_of_transports(text: str) -> None:
    """A region that this process cannot have is named with its length; the listener goes on."""

    async def accept(_: bytes) -> Accepted:
        return Accepted(1, b"")

    async def register(listener: Listener, size_bytes: int) -> Region:
        return await listener.register(
            "x", size_bytes, accept=accept, on_notify=lambda: None, on_session_lost=lambda _: None
        )

    here = Address.parse(text)
    async with registry.transport_for(here).listen(here, Options()) as listener:
        with pytest.raises(ListenFailed, match=f"no {1 << 60} bytes of memory for {here.scheme}://.*/x"):
            await register(listener, 1 << 60)
        assert len((await register(listener, 4096)).view) == 4096


def test_loopback_is_known() -> None:
    """Only addresses that no other machine can reach count as loopback."""
    near = ["local://x", "tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1", "tcp://127.9.9.9:1"]
    near += ["tcp://[0:0::1]:1", "tcp://[::ffff:127.0.0.1]:1"]
    assert all(Address.parse(text).is_loopback for text in near)
    far = ["tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "tcp://127.example.org:1", "tcp://127.0.0.1.example.org:1"]
    assert not any(Address.parse(text).is_loopback for text in far)


def test_built_in_transports_are_found() -> None:
    """Scheme and address lead to the same transport, each time."""
    assert isinstance(registry.transport_for("tcp"), TcpTransport)
    local = registry.transport_for(Address.parse("local://house"))
    assert isinstance(local, LocalTransport)
    assert registry.transport_for("local") is local


def test_unknown_scheme_lists_the_known() -> None:
    """Who asks for a scheme that nobody registered is told those that are, and how to add one."""
    with pytest.raises(UnknownScheme, match=r"'pigeon'.*local, tcp.*onepiece\.transports"):
        registry.transport_for("pigeon")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, EntryPoint]]:
    """Entry points of packages that are not really there."""
    points: dict[str, EntryPoint] = {}
    monkeypatch.setattr(registry, "_installed", lambda: points)
    registry._load.cache_clear()
    yield points
    registry._load.cache_clear()


def test_third_party_transports_are_loaded(installed: dict[str, EntryPoint]) -> None:
    """An entry point adds a scheme; one that cannot be imported, or makes something else, is named."""
    group = registry.ENTRY_POINT_GROUP
    installed["carrier"] = EntryPoint("carrier", "transports.local:LocalTransport", group)
    installed["absent"] = EntryPoint("absent", "package_that_is_not_there:Transport", group)
    installed["older"] = EntryPoint("older", "transports.local:NoSuchTransport", group)
    installed["other"] = EntryPoint("other", "builtins:dict", group)
    assert isinstance(registry.transport_for("carrier"), LocalTransport)
    ours = ("local", "tcp", "ucx", "verbs")
    assert registry.known_schemes() == tuple(sorted([*ours, *installed]))
    with pytest.raises(UnknownScheme, match="package_that_is_not_there"):
        registry.transport_for("absent")
    with pytest.raises(UnknownScheme, match="NoSuchTransport"):
        registry.transport_for("older")
    with pytest.raises(UnknownScheme, match="makes no Transport"):
        registry.transport_for("other")


@settings(deadline=None)
@given(identity=st.text(min_size=1, max_size=100).filter(lambda text: text.isprintable()))
def test_hellos_come_back(identity: str) -> None:
    """A hello is read as it was written."""
    assert Hello.from_bytes(Hello(identity).to_bytes()).identity == identity


def test_unfit_identities_are_refused_where_they_are_made() -> None:
    """No identity, or one longer than the bound, cannot be introduced."""
    for identity in ("", "x" * (IDENTITY_BYTES_MAX + 1)):
        with pytest.raises(ValueError, match="1 to 512"):
            Hello(identity)


@settings(deadline=None)
@given(data=st.binary(max_size=64))
def test_random_hellos_are_refused_or_read(data: bytes) -> None:
    """Whatever bytes come as a hello, they are read or refused with a name."""
    try:
        Hello.from_bytes(data)
    except HandshakeRefused:
        return


def test_welcomes_come_back() -> None:
    """A welcome is read as it was written; other layouts and lengths are named."""
    welcome = Welcome(77, 1 << 40, 2.5, Geometry(8, 4096, 3))
    data = welcome.to_bytes()
    assert Welcome.from_bytes(data) == welcome
    with pytest.raises(LayoutMismatch, match="layout"):
        Welcome.from_bytes(b"\x63" + data[1:])
    for bad in (data[:10], data[:-1], data + b"x"):
        with pytest.raises(ProtocolError):
            Welcome.from_bytes(bad)
    for wrong in (
        evolve(welcome, generation=0),
        evolve(welcome, generation=1 << 32),
        evolve(welcome, first_number=1 << 63),
        *(evolve(welcome, lease_seconds=seconds) for seconds in (0.0, -1.0, math.nan, math.inf)),
    ):
        with pytest.raises(ProtocolError, match="a welcome with"):
            Welcome.from_bytes(wrong.to_bytes())


def test_pauses_grow_within_bounds_and_differ() -> None:
    """Waits grow with the attempts up to a bound; after a lost swap they are spread from zero up."""
    rng = random.Random(1)
    for reason, bound in ((PauseReason.FULL, 0.1), (PauseReason.CONTENDED, 0.02)):
        first = [pause_seconds(Pause(reason, 1), rng) for _ in range(50)]
        late = [pause_seconds(Pause(reason, 10_000), rng) for _ in range(50)]
        assert max(first) < max(late) <= bound
        assert len(set(late)) > 40
    assert min(pause_seconds(Pause(PauseReason.CONTENDED, 9), rng) for _ in range(100)) < 0.002


def test_region_programs_run_without_a_loop() -> None:
    """Loads see what was stored; a program stops at a fence and goes on after it; its result is kept."""

    def program() -> Program[bytes]:
        yield Store(8, b"12345678")
        seen = bytes((yield Load(8, 4)))
        yield Fence((3, 4))
        yield Store(0, seen)
        return seen

    view = memoryview(bytearray(64))
    running = RegionRun(program())

    def finished() -> bool:
        running.advance(view)
        return running.finished

    assert not finished()
    assert running.wants_fenced == (3, 4)
    assert bytes(view[:8]) == bytes(8)
    assert finished()
    assert running.result == b"1234"
    assert bytes(view[:4]) == b"1234"


def test_programs_on_the_wrong_side_are_our_bug() -> None:
    """A consumer's program that reads a peer, or fences where it must not, fails loudly."""

    def reads() -> Program[None]:
        yield Read(0, 8)

    def fences() -> Program[None]:
        yield Fence((1,))

    view = memoryview(bytearray(64))
    with pytest.raises(AssertionError, match="acts on a peer"):
        run_on_region(reads(), view)
    with pytest.raises(AssertionError, match="neither fence nor pull"):
        run_on_region(fences(), view)


@settings(deadline=None)
@given(offset=st.integers(-100, 1 << 70), length=st.integers(0, 1 << 70))
def test_region_memory_stays_inside(offset: int, length: int) -> None:
    """A span lies in the region or is refused; a word must be aligned as well."""
    memory = RegionMemory(4096)
    inside = offset >= 0 and offset + length <= 4096
    if inside:
        assert len(memory.span(offset, length)) == length
    else:
        with pytest.raises(ProtocolError):
            memory.span(offset, length)
    if 0 <= offset <= 4088 and offset % 8 == 0:
        assert memory.compare_and_swap(offset, 0, 7) == 0
        assert memory.fetch_and_add(offset, 1) == 7
    else:
        with pytest.raises(ProtocolError):
            memory.compare_and_swap(offset, 0, 7)
        with pytest.raises(ProtocolError):
            memory.fetch_and_add(offset, 1)


def test_the_first_ending_stays() -> None:
    """A session ends once; everyone is told the same reason, each with an exception of its own."""
    ending = Ending()
    ending.check()
    assert ending.reach(SessionFenced("fenced"))
    assert not ending.reach(PeerLost("lost"))
    assert ending.over()
    with pytest.raises(SessionFenced, match="fenced") as first:
        ending.check()
    with pytest.raises(SessionFenced, match="fenced") as second:
        ending.check()
    assert first.value is not second.value


async def test_background_ends_with_its_owner() -> None:
    """Tasks are cancelled and awaited at the end; a failure reaches the owner; the block's error is bare."""
    failures: list[BaseException] = []
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("waited")

    async def fail() -> None:
        raise ValueError("broken")

    async def block() -> None:
        async with Background(failures.append) as background:
            background.start(wait())
            background.start(fail())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            raise KeyError("of the block")

    with pytest.raises(KeyError, match="of the block"):
        await block()
    assert ended == ["waited"]
    assert [str(failure) for failure in failures] == ["broken"]
