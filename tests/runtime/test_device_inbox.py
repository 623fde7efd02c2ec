"""One actor with its inbox in the memory of a pretended GPU: what is kept how long, and what is refused."""

import asyncio
import gc
import re
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from attrs import define, evolve, field
from numpy.typing import NDArray
from structlog.testing import capture_logs

from onepiece import Gpu, StageContext, Tensor, _torch, at_most_once, stage, workflow
from onepiece._bounded import described
from onepiece.core.inventory import ActorState, Device, DeviceKind
from onepiece.core.routing import ActorRoute
from onepiece.errors import DefinitionError
from onepiece.graph import INPUTS, InboxMemory
from onepiece.limits import INBOX_HEAD_BYTES
from onepiece.messages import StageInput
from onepiece.runtime import inbox_rooms
from onepiece.runtime.counts import PEER_LOST
from onepiece.runtime.device_messages import lies_in_host
from onepiece.runtime.profiling import ProfileOptions, profile_workflow
from onepiece.runtime.result_deliver import Letter, ResultDeliver
from onepiece.runtime.result_targets import StageTarget
from tests.runtime.actor_rig import ActorRig, actor_rig
from tests.runtime.pretended_gpu import CountingDriver, GpuArray, pretended_gpu
from tests.runtime.rig import until
from tests.transports.fake_cuda import assert_given_back
from transports import Geometry, Receiver

INBOX_BYTES = 1 << 16
LENGTH = 20_000
"""Three of these fit into the inbox, and no fourth one."""


@pytest.fixture
def driver() -> Iterator[CountingDriver]:
    """The GPU's driver."""
    with pretended_gpu() as pretended:
        yield pretended
        assert_given_back(pretended)


@define
class Memory:
    """A state that keeps what it should clone."""

    kept: list[GpuArray] = field(factory=list)


memory = Memory()


async def remember(ctx: StageContext[None]) -> AsyncIterator[Memory]:
    """Hand out what the tests look into."""
    memory.kept.clear()
    yield memory
    memory.kept.clear()


@stage(resources=Gpu(), inbox="device", setup=remember)
async def look(ctx: StageContext[Memory], image: Tensor, keeps: bool = False, text: str = "") -> str:
    """Say what arrived; keep it if told so."""
    assert isinstance(image, GpuArray)
    if keeps:
        ctx.state.kept.append(image)
    if text == "fail":
        raise ValueError("as it was told")
    return f"{image.content()[:4].hex()} of {len(image.content())}, {len(text)}"


@workflow
def looking(image: Tensor, keeps: bool = False, text: str = "") -> str:
    """One stage in a device's memory."""
    return at_most_once(look(image, keeps=keeps, text=text))


@stage(resources=Gpu(), inbox="device")
async def hand_on(ctx: StageContext[None], image: Tensor) -> Tensor:
    """Put out what came in."""
    return image


@workflow
def handing_on(image: Tensor) -> Tensor:
    """One stage whose output is its input."""
    return at_most_once(hand_on(image))


def inbox_of(rigged: ActorRig) -> Receiver:
    """The actor's."""
    [inbox] = [each for name, each in rigged.env.inboxes.receivers() if name.startswith("actor/")]
    return inbox


def depth(rigged: ActorRig) -> int:
    """Messages that were handed over and whose room was not given back."""
    return inbox_of(rigged).depth


def picture(number: int) -> GpuArray:
    """An input."""
    return GpuArray.of(bytes([number]) * LENGTH)


def said(number: int, text: str = "") -> str:
    """What ``look`` says of it."""
    return f"{bytes([number] * 4).hex()} of {LENGTH}, {len(text)}"


async def test_room_is_given_back_when_the_device_is_done(driver: CountingDriver) -> None:
    """A stage has ended, and what it gave the device to do may not have: until then its input stays there."""
    async with actor_rig(looking, device="cuda:0", inbox_bytes=INBOX_BYTES) as rigged:
        driver.is_awaited.clear()
        driver.is_done.clear()
        try:
            await rigged.submit("a", image=picture(1))
            assert await rigged.outcome("a") == said(1)
            await until(driver.is_awaited.is_set)
            assert depth(rigged) == 1
        finally:
            driver.is_done.set()
        await until(lambda: depth(rigged) == 0)


@stage(resources=Gpu())
async def glance(ctx: StageContext[None], image: Tensor) -> str:
    """The same from an inbox in the host's memory."""
    return f"{len(image.content())}"


@workflow
def glancing(image: Tensor) -> str:
    """One stage."""
    return glance(image)


@pytest.mark.parametrize("flow", [looking, glancing], ids=["device", "host"])
@pytest.mark.parametrize("length", [8, 100_000], ids=["small", "large"])
async def test_tensors_are_made_in_the_stages_thread(
    flow: Any, length: int, driver: CountingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is done on a GPU waits for the GPU: it never holds up the node's event loop."""
    threads: list[str] = []

    def noted(make: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            threads.append(threading.current_thread().name)
            return make(*arguments, **more)

        return call

    for name in ("from_buffer", "over_span"):
        monkeypatch.setattr(_torch, name, noted(getattr(_torch, name)))
    async with actor_rig(flow, device="cuda:0", inbox_bytes=1 << 18) as rigged:
        await rigged.submit("a", image=GpuArray.of(bytes(length)))
        await rigged.outcome("a")
    assert threads == ["stage-cuda:0"]


async def test_what_an_actor_takes_of_its_device_is_told_with_its_inbox(
    driver: CountingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch tells is the stage's alone; where it cannot be told nothing is said of the inbox either."""
    most = 0
    monkeypatch.setattr(_torch, "cuda_use", lambda index: (0, most))
    async with actor_rig(looking, device="cuda:0", inbox_bytes=INBOX_BYTES) as rigged:
        assert rigged.actor.report().work.memory_bytes == 0
        most = 5 << 20
        await rigged.submit("a", image=picture(1))
        assert await rigged.outcome("a") == said(1)
        assert rigged.actor.report().work.memory_bytes == most + INBOX_BYTES


async def test_many_laps(driver: CountingDriver) -> None:
    """Requests beyond what the inbox holds all end, one that fails among them: no room is lost."""
    async with actor_rig(looking, device="cuda:0", inbox_bytes=INBOX_BYTES) as rigged:
        for number in range(12):
            text = "fail" if number == 5 else "x" * number
            await rigged.submit(str(number), image=picture(number), text=text)
        for number in range(12):
            outcome = await rigged.outcome(str(number))
            if number == 5:
                assert outcome["error"] == "StageFailed"
            else:
                assert outcome == said(number, "x" * number)
        await until(lambda: depth(rigged) == 0)


async def test_what_a_stage_keeps_is_not_written_over(driver: CountingDriver) -> None:
    """It holds up those that come next, as a full inbox does, until the stage lets go of it."""
    async with actor_rig(looking, device="cuda:0", inbox_bytes=INBOX_BYTES) as rigged:
        for number in range(3):
            await rigged.submit(str(number), image=picture(number), keeps=True)
            await rigged.outcome(str(number))
        assert inbox_of(rigged).free_bytes < LENGTH
        waiting = asyncio.ensure_future(rigged.submit("3", image=picture(3)))
        assert [array.content() for array in memory.kept] == [bytes([n]) * LENGTH for n in range(3)]
        memory.kept.clear()
        await waiting
        assert await rigged.outcome("3") == said(3)


async def test_a_stage_that_keeps_inputs_is_told_of(
    driver: CountingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, in the log, when the stage has nothing else in hand."""
    monkeypatch.setattr(inbox_rooms, "OCCUPIED_COLLECT_SECONDS", 0.01)
    monkeypatch.setattr(inbox_rooms, "OCCUPIED_IDLE_SECONDS", 0.01)
    with capture_logs() as logs:
        async with actor_rig(looking, device="cuda:0", inbox_bytes=INBOX_BYTES) as rigged:
            await rigged.submit("a", image=picture(1))
            await rigged.submit("b", image=picture(2), keeps=True)
            assert await rigged.outcome("b") == said(2)
            await until(lambda: any(each["event"] == "stage_keeps_inputs" for each in logs))
            await rigged.submit("c", image=picture(3), keeps=True)
            assert await rigged.outcome("c") == said(3)
    told = [each for each in logs if each["event"] == "stage_keeps_inputs"]
    assert [each["messages"] for each in told] == [1]
    assert told[0]["stage"].endswith(":look")


def fail(image: GpuArray) -> str:
    """Raise with an input in hand."""
    raise ValueError(f"{image.dtype} is nothing to be looked at")


@stage(resources=Gpu(), inbox="device")
async def stumble(ctx: StageContext[None], image: Tensor, how: str) -> str:
    """Fail in blocking work, or in one of several tasks, whose errors refer to themselves."""
    if how == "run":
        return await ctx.run(fail, image)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ctx.run(fail, image))
    return ""


@workflow
def stumbling(image: Tensor, how: str) -> str:
    """One stage that fails."""
    return stumble(image, how)


@pytest.fixture
def no_garbage_is_found_by_chance() -> Iterator[None]:
    """Whoever needs the garbage collector calls it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_is_found_by_chance")
@pytest.mark.parametrize(("how", "seconds"), [("run", 1e6), ("tasks", 0.01)])
async def test_what_has_failed_keeps_no_room(
    how: str,
    seconds: float,
    driver: CountingDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of blocking work lets go of it by itself; a circle is looked for when nothing is in hand."""
    monkeypatch.setattr(inbox_rooms, "OCCUPIED_COLLECT_SECONDS", seconds)
    with capture_logs() as logs:
        async with actor_rig(stumbling, device="cuda:0", inbox_bytes=INBOX_BYTES) as rigged:
            for number in range(5):  # more than the inbox holds
                await rigged.submit(str(number), image=picture(number), how=how)
                assert (await rigged.outcome(str(number)))["error"] == "StageFailed"
            await until(lambda: depth(rigged) == 0)
    assert not [each for each in logs if each["event"] == "stage_keeps_inputs"]


async def test_what_a_stage_keeps_does_not_keep_the_actor(driver: CountingDriver) -> None:
    """An actor that is to leave does, though its stage keeps an input; that one stays readable behind it."""
    async with actor_rig(looking, device="cuda:0", inbox_bytes=INBOX_BYTES) as rigged:
        await rigged.submit("a", image=picture(1), keeps=True)
        assert await rigged.outcome("a") == said(1)
        (array,) = memory.kept
        rigged.actor.drain()
        await rigged.running
        assert array.content() == bytes([1]) * LENGTH
        del array
        gc.collect()


async def test_an_output_may_be_the_input(driver: CountingDriver) -> None:
    """Its room is given back once it has been sent on; the store has its bytes."""
    async with actor_rig(handing_on, device="cuda:0", inbox_bytes=INBOX_BYTES) as rigged:
        for number in range(5):
            await rigged.submit(str(number), image=picture(number))
        for number in range(5):
            result = await rigged.outcome(str(number))
            assert result.content() == bytes([number]) * LENGTH
            del result
        await until(lambda: depth(rigged) == 0)
        rigged.stored.clear()


async def test_a_long_head_goes_with_the_payload(driver: CountingDriver) -> None:
    """More plain values than there is room for beside a slot are no reason to refuse a message."""

    @stage(resources=Gpu(), inbox="device")
    async def join(ctx: StageContext[None], texts: list[str], image: Tensor) -> str:
        """Say what arrived."""
        return f"{len(texts)} {''.join(texts)[-9:]} {image.content()[:2].hex()}"

    @workflow
    def joining(texts: list[str], image: Tensor) -> str:
        """One stage."""
        return join(texts, image)

    texts = [f"{number:09}" for number in range(INBOX_HEAD_BYTES // 8)]
    async with actor_rig(joining, device="cuda:0", inbox_bytes=INBOX_BYTES) as rigged:
        await rigged.submit("a", texts=texts, image=picture(9))
        assert await rigged.outcome("a") == f"{len(texts)} {texts[-1]} 0909"


async def test_what_is_too_long_for_the_inbox_is_refused(driver: CountingDriver) -> None:
    """Nothing is pulled into a device's memory: the error says what to raise."""
    async with actor_rig(looking, device="cuda:0", inbox_bytes=INBOX_BYTES) as rigged:
        with pytest.raises(Exception, match=r"--inbox-bytes") as caught:
            await rigged.submit("a", image=GpuArray.of(bytes(INBOX_BYTES)))
        assert type(caught.value).__name__ == "PayloadTooLarge"
        del caught


async def test_a_device_that_fails_ends_the_actor(driver: CountingDriver) -> None:
    """Nobody knows when it is done with what lies there: the actor crashes, with the driver's reason."""

    async def live() -> None:
        async with actor_rig(looking, device="cuda:0", inbox_bytes=INBOX_BYTES) as rigged:
            driver.fails = {"cuCtxSynchronize": 400}
            await rigged.submit("a", image=picture(1))
            await asyncio.wait([rigged.running])

    with pytest.raises(ExceptionGroup) as caught:
        await live()
    assert "cuCtxSynchronize failed with CUDA_ERROR_INVALID_HANDLE" in described(caught.value)
    driver.fails = {}
    del caught


async def test_such_a_workflow_is_profiled(driver: CountingDriver) -> None:
    """Its messages lie in the host's memory there, whatever its inboxes are in."""

    @stage(resources=Gpu())
    async def paint(ctx: StageContext[None], number: int) -> Tensor:
        """Something on a GPU."""
        return picture(number)

    @workflow
    def painting(number: int) -> str:
        """Two stages."""
        return look(paint(number))

    device = Device("cuda:0", DeviceKind.GPU, 1 << 32)
    options = ProfileOptions(samples=2, warm_up=0)
    profile = await profile_workflow(painting, {"number": 4}, device, options)
    sizes = {each.stage.rpartition(".")[2]: each.output_bytes for each in profile.stages}
    assert sizes["paint"] > LENGTH


@pytest.mark.parametrize("head_bytes", [0, 4096], ids=["host", "device"])
async def test_what_was_not_taken_is_sent_elsewhere(head_bytes: int, driver: CountingDriver) -> None:
    """An inbox closes with a message from a device in it: another actor gets it from there once more."""
    async with actor_rig(looking, device="cuda:0", inbox_bytes=INBOX_BYTES) as rigged:
        env, graph = rigged.env, rigged.workflow.graph
        header = StageInput("a", graph.name, "look", INPUTS, env.control_address, 0.0, None, 0.0)
        target = StageTarget(header, rigged.actor.stage.key, {"image": ()}, inbox=InboxMemory.DEVICE)
        here = ActorRoute(1, target.stage, "node-1", 1, ("cuda:0",), rigged.actor.address, ActorState.READY)
        memory = "cuda:0" if head_bytes else "host"
        geometry = Geometry(64, INBOX_BYTES, 64, head_bytes)
        async with env.inboxes.open("actor/2", geometry, memory=memory):
            gone = evolve(here, actor_id=2, address=str(env.address.region("actor/2")))
            env.routes.update(evolve(env.routes.table, actors=(gone,)), env.routes.graphs, {})
            parts = target.pack(picture(1)).parts
            assert not lies_in_host(parts)
            assert await ResultDeliver(env).send(Letter(target, parts)) == "node-1.1"
            env.routes.update(evolve(env.routes.table, actors=(here,)), env.routes.graphs, {})
        assert await rigged.outcome("a") == said(1)
        assert env.counts.resent[target.stage, PEER_LOST] == 1
        assert driver.copied_to_host == ([] if head_bytes else [LENGTH])


@pytest.mark.parametrize(
    ("device", "scheme", "what"),
    [
        (
            "cpu:0",
            "local",
            r"^DeviceUnreachable: .*:look wants .*cpu:0 is none: .*--devices cuda:0.*leave inbox",
        ),
        (
            "cuda:0",
            "tcp",
            r"^DeviceUnreachable: .*tcp does not reach devices; listen on verbs:.*leave inbox",
        ),
        ("cuda:7", "local", r"^DeviceUnreachable: no inbox in .*cuda:7.*sees 2 CUDA devices.*leave inbox="),
    ],
)
async def test_an_inbox_that_cannot_be_there_is_nowhere(
    device: str, scheme: str, what: str, driver: CountingDriver
) -> None:
    """The actor fails, and its report says why and what to do; it never takes another memory."""
    async with actor_rig(looking, device=device, scheme=scheme, inbox_bytes=INBOX_BYTES) as rigged:
        report = rigged.actor.report()
        assert report.state is ActorState.FAILED
        assert report.error is not None
        assert re.search(what, report.error), report.error
        assert report.address == ""
        await until(lambda: gc.collect() >= 0 and not driver.memory)
        rigged.actor.drain()
        await rigged.running


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"inbox": "device"}, r"resources=Gpu"),
        ({"inbox": "device", "resources": Gpu(), "isolation": "process"}, r"isolation='process'"),
        ({"inbox": "device", "resources": Gpu(count=2)}, r"on several devices"),
        ({"inbox": "gpu", "resources": Gpu()}, r"'host' and 'device' exist"),
        ({"inbox": ["device"], "resources": Gpu()}, r"'host' and 'device' exist"),
    ],
)
def test_what_makes_no_sense_is_told_where_it_is_written(options: dict[str, Any], what: str) -> None:
    """A stage that could never have such an inbox is refused when its module is imported."""
    with pytest.raises(DefinitionError, match=what):
        _stage_with(options)


def test_an_inbox_without_tensors_is_refused() -> None:
    """Numbers, texts and numpy's arrays would go to the GPU only to be copied back; nested tensors do not."""
    make: Any = stage(resources=Gpu(), inbox="device")

    async def plain(ctx: StageContext[None], number: int, array: NDArray[np.float32], text: str) -> str:
        return ""

    async def nested(ctx: StageContext[None], number: int, values: dict[str, list[Tensor] | None]) -> str:
        return ""

    with pytest.raises(DefinitionError, match=r"plain: inbox='device' with no parameter that can be a torch"):
        make(plain)
    assert make(nested).spec.inbox is InboxMemory.DEVICE


def _stage_with(options: dict[str, Any]) -> None:
    make: Any = stage(**options)
    make(look.function)
