"""One stage actor of one node, over the transport inside the process: its inbox, its owner, its store."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from attrs import define, field

from onepiece.codec import VALUE_CONTENT_TYPE, materialise, unpack, value_from_bytes
from onepiece.core.inventory import ActorState
from onepiece.core.retention import RetentionTable
from onepiece.core.routing import NodeRoute, RouteEpoch, RouteTable
from onepiece.graph import INPUTS
from onepiece.messages import (
    KIND_STAGE_INPUT,
    STORE_REGION,
    RequestErrored,
    ResultInput,
    StageInput,
    StageProgress,
    StageReport,
    with_attempt,
)
from onepiece.requests import EventKind
from onepiece.runtime.devices import open_device_threads
from onepiece.runtime.environment import Environment, Identity, Inboxes, Routes
from onepiece.runtime.outbox import Outbox, open_outbox
from onepiece.runtime.result_targets import input_targets
from onepiece.runtime.retainer import Output, Retainer
from onepiece.runtime.stage_actor import StageActor
from onepiece.types import ANY
from onepiece.workflow import Workflow
from tests.runtime.rig import until
from transports import Address, Geometry, Options, Receiver, transport_for

_HOUSES = count()


@define(eq=False)
class ActorRig:
    """A running actor for the first stage of a workflow of one stage."""

    workflow: Workflow[Any, Any]
    actor: StageActor
    env: Environment
    outbox: Outbox
    running: "asyncio.Task[None]"
    states: list[ActorState] = field(factory=list)
    heard: list[object] = field(factory=list)
    """What the owner was told."""
    stored: dict[str, Any] = field(factory=dict)
    """Results by UID."""

    async def submit(self, uid: str, *, attempt: int = 1, **inputs: Any) -> None:
        """Send a request's inputs as its owner does."""
        graph = self.workflow.graph
        node = graph.nodes[0].id
        owner = self.env.control_address
        header = StageInput(uid, graph.name, node, INPUTS, owner, 0.0, None, 0.0)
        for _, target in input_targets(graph, header):
            packed = target.pack({**{each.name: each.default for each in graph.inputs}, **inputs})
            parts = with_attempt(packed.parts, attempt)
            await self.outbox.send(self.actor.address, parts, kind=KIND_STAGE_INPUT)

    def kinds(self, uid: str) -> list[str]:
        """The events of a request, as its owner heard them."""
        kinds: list[str] = []
        for each in self.heard:
            if isinstance(each, StageProgress) and each.uid == uid:
                kinds.append(each.kind)
            elif isinstance(each, StageReport) and each.uid == uid:
                told = (("queued", each.queued_at), ("stage_started", each.started_at))
                moments = (*told, ("stage_finished", each.finished_at))
                kinds += [kind for kind, at in moments if at is not None and kind not in kinds]
        return kinds

    def error(self, uid: str) -> dict[str, Any] | None:
        """Why a request cannot go on, if so."""
        for each in self.heard:
            if isinstance(each, RequestErrored) and each.uid == uid:
                return dict(each.error)
        return None

    async def outcome(self, uid: str) -> Any:
        """A request's result, or its error as a map."""
        await until(lambda: uid in self.stored or self.error(uid) is not None)
        return self.stored[uid] if uid in self.stored else self.error(uid)

    async def heard_of(self, uid: str, kind: EventKind) -> None:
        """Wait until the owner has heard such an event of a request."""
        await until(lambda: kind.value in self.kinds(uid))

    async def keep_results(self, receiver: Receiver) -> None:
        """Keep what arrives at the result store."""
        while True:
            delivery = await receiver.receive()
            unpacked = unpack(delivery.payload, ResultInput)
            result = materialise(unpacked.values["value"], ANY)
            is_value = unpacked.header.content_type == VALUE_CONTENT_TYPE
            self.stored[unpacked.header.uid] = value_from_bytes(result) if is_value else result
            receiver.release(delivery)


@asynccontextmanager
async def actor_rig(
    workflow: Workflow[Any, Any], *, device: str = "cpu:0", inbox_bytes: int = 1 << 24, scheme: str = "local"
) -> AsyncIterator[ActorRig]:
    """Run an actor until the block ends; it must have ended then without an error of ours."""
    is_local = scheme == "local"
    address = Address.parse(f"local://actor-rig-{next(_HOUSES)}" if is_local else f"{scheme}://127.0.0.1:0")
    stage = next(iter(workflow.stages.values()))
    identity = Identity("node-1", 1)
    async with (
        transport_for(address).listen(address, Options()) as listener,
        open_outbox(lambda: identity.life, Options()) as outbox,
        open_device_threads(device, close_seconds=1.0) as threads,
        asyncio.TaskGroup() as tasks,
    ):
        address = listener.address
        control = f"{address}/control"
        states: list[ActorState] = []
        table: RetentionTable[Output] = RetentionTable(1 << 30, 1 << 30)
        env = Environment(
            identity=identity,
            address=address,
            control_address=control,
            inboxes=Inboxes(listener),
            outbox=outbox,
            routes=_routes(address, workflow),
            inbox_bytes=inbox_bytes,
            join_bytes=1 << 20,
            on_change=lambda: states.append(actor.state),
            retainer=Retainer(table, None, tasks),
        )
        kind, _, first = device.partition(":")
        devices = tuple(f"{kind}:{int(first) + index}" for index in range(stage.spec.resources.count))
        actor = StageActor(1, stage, threads, env, devices=devices)
        running = tasks.create_task(actor.run())
        made = ActorRig(workflow, actor, env, outbox, running, states)
        outbox.deliver_locally(control, made.heard.append)
        async with env.inboxes.open(STORE_REGION, Geometry(64, 1 << 24, 64)) as store:
            storing = tasks.create_task(made.keep_results(store))
            await until(lambda: actor.state is not ActorState.LOADING)
            try:
                yield made
            finally:
                running.cancel()
                storing.cancel()
                await asyncio.wait([running, storing])


def _routes(address: Address, workflow: Workflow[Any, Any]) -> Routes:
    routes = Routes()
    node = NodeRoute("node-1", 1, str(address), None, ("worker", "store"), "alive", (), 1)
    routes.update(RouteTable(RouteEpoch(1, 1), nodes=(node,)), {workflow.name: workflow.graph}, {})
    return routes
