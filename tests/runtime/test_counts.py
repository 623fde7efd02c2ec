"""What seldom happens to stage tasks and outputs is counted, each under its reason."""

from typing import Any

import pytest

from onepiece import StageContext, stage, workflow
from onepiece.codec import VALUE_CONTENT_TYPE
from onepiece.errors import OnePieceError, RequestCancelled
from onepiece.messages import STORE, ResultInput
from onepiece.runtime.counts import PEER_LOST, REPEATED
from onepiece.runtime.result_deliver import Letter, ResultDeliver
from onepiece.runtime.result_targets import StoreTarget
from onepiece.runtime.stage_actor import StageActor
from tests.runtime.actor_rig import ActorRig, actor_rig
from tests.runtime.rig import until


@stage(isolation="loop")
async def giving(ctx: StageContext[None], text: str) -> str:
    """Gives back what it is given."""
    if text == "fails":
        raise ValueError(text)
    return text


@workflow
def give(text: str) -> str:
    """It alone."""
    return giving(text)


def counts_of(rigged: ActorRig) -> tuple[dict[str, float], dict[str, int]]:
    """Seconds wasted, and stage tasks dropped, by error."""
    counts = rigged.actor.load().counts
    return dict(counts.wasted_seconds), dict(counts.dropped)


async def test_a_run_that_fails_is_wasted() -> None:
    """Its seconds count under the error that the request ends in; it counts as busy, not as a run."""
    async with actor_rig(give) as rigged:
        await rigged.submit("one", text="fails")
        assert (await rigged.outcome("one"))["error"] == "StageFailed"
        wasted, dropped = counts_of(rigged)
        load = rigged.actor.load()
        assert wasted == {"StageFailed": load.counts.fruitless_seconds}
        assert load.counts.fruitless_seconds > 0
        assert (dropped, load.work.runs, load.counts.loads) == ({}, 0, 1)


async def test_what_comes_for_a_request_that_was_stopped_is_dropped() -> None:
    """It never runs, and the reason is that of the stop."""
    async with actor_rig(give) as rigged:
        rigged.actor.stop_request("one", RequestCancelled("request one was cancelled", uid="one"))
        await rigged.submit("one", text="late")
        await until(lambda: rigged.error("one") is not None)
        assert counts_of(rigged) == ({}, {"RequestCancelled": 1})


async def test_an_output_that_nobody_wants_any_more_is_wasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has finished for a request that ended meanwhile counts as a run, and as wasted."""
    send_on = StageActor._send_on

    async def ended_in_between(self: StageActor, *shipped: Any) -> None:
        self._intake.stop("one", OnePieceError("request one has ended", uid="one"))
        await send_on(self, *shipped)

    monkeypatch.setattr(StageActor, "_send_on", ended_in_between)
    async with actor_rig(give) as rigged:
        await rigged.submit("one", text="ahoy")
        await until(lambda: rigged.actor.load().work.runs == 1 and rigged.actor.is_idle)
        wasted, dropped = counts_of(rigged)
        assert list(wasted) == ["OnePieceError"]
        assert dropped == {}
        assert rigged.actor.load().counts.fruitless_seconds == 0, "it put something out"


async def test_an_output_whose_peer_was_lost_is_sent_again() -> None:
    """It counts by where it goes; one that nobody wants any more is not sent, and not counted."""
    async with actor_rig(give) as rigged:
        header = ResultInput("one", "give", rigged.env.control_address, VALUE_CONTENT_TYPE, 0.0)
        target = StoreTarget(header, ())
        deliver = ResultDeliver(rigged.env)
        letter = Letter(target, target.pack("ahoy").parts, losses=1)
        await deliver._send_again(letter)
        assert await rigged.outcome("one") == "ahoy"
        assert rigged.env.counts.resent == {(STORE, PEER_LOST): 1}
        await deliver._send_again(Letter(target, letter.parts, losses=1, is_wanted=lambda: False))
        assert rigged.env.counts.resent == {(STORE, PEER_LOST): 1}


async def test_inputs_that_come_again_have_the_output_sent_again() -> None:
    """Their stage has run: what it put out, and is still retained, goes out once more."""
    async with actor_rig(give) as rigged:
        await rigged.submit("one", text="ahoy")
        assert await rigged.outcome("one") == "ahoy"
        rigged.stored.clear()
        await rigged.submit("one", attempt=2, text="ahoy")
        assert await rigged.outcome("one") == "ahoy"
        assert rigged.env.counts.resent == {(STORE, REPEATED): 1}
        assert rigged.actor.load().work.runs == 1
