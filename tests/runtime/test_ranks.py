"""A stage on several devices: each request by all ranks, and one that fails takes the others along."""

import itertools
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from onepiece.errors import InvalidInput, RequestCancelled, StageFailed
from onepiece.runtime.rank_group import RankGroup
from onepiece.runtime.task_worker import Outcome
from tests.runtime.ranked_stages import Fault, hurried, patch_up, stumble, take_turns
from tests.runtime.rig import PATIENT, SHORT, Rig, children, descriptors, is_alive, rig, until

CANCELLED = RequestCancelled("request u was cancelled", uid="u")


def ranks(rigged: Rig) -> tuple[int, ...]:
    """The processes of the stage."""
    assert isinstance(rigged.state, RankGroup)
    return rigged.state.process_ids


def failure(outcome: Outcome[object]) -> StageFailed:
    """The error of a stage task that must have failed in its stage."""
    assert isinstance(outcome.error, StageFailed), outcome
    return outcome.error


async def test_every_rank_works_on_the_request() -> None:
    """The result is rank 0's, as are the reports; nothing is left behind."""
    before, open_before = children(), descriptors()
    async with rig(stumble) as rigged:
        processes = ranks(rigged)
        assert len(set(processes)) == 2
        assert await rigged.value() == [processes[0], 0, 2]
        assert [detail["rank"] for _, detail in rigged.progress] == [0]
        assert set(processes) == children() - before
    assert children() == before
    assert descriptors() == open_before


async def test_the_order_in_which_ranks_finish_changes_nothing(tmp_path: Path) -> None:
    """Partial results are merged in the order of the ranks, whoever was first (fault 75)."""
    pixels = np.arange(100_000.0)
    async with rig(take_turns) as rigged:
        for order in itertools.permutations(range(3)):
            directory = tmp_path / "".join(map(str, order))
            directory.mkdir()
            merged = await rigged.value(pixels=pixels, order=list(order), directory=str(directory))
            assert np.asarray(merged).tobytes() == np.square(pixels).tobytes()  # a tensor, if torch is there


RAISING: dict[Fault, str] = {
    "raise": "failed on node-1, rank 1 of 2: ValueError: the latents of rank 1 are not finite",
    "segfault": "its process (rank 1 of 2) was killed by SIGSEGV",
    "_exit": "its process (rank 1 of 2) exited with status 3",
}


@pytest.mark.parametrize("fault", RAISING)
async def test_one_rank_that_fails_releases_the_others(fault: Fault) -> None:
    """They wait for it in a collective, and are ended at once; the error names the rank that is to blame."""
    async with rig(stumble, PATIENT) as rigged:
        processes = ranks(rigged)
        error = failure(outcome := await rigged.run(fault=fault, rank=1))
        assert RAISING[fault] in error.message
        assert error.fields["rank"] == 1
        assert outcome.is_dirty
        assert not any(map(is_alive, processes))


async def test_what_every_rank_refuses_costs_nothing() -> None:
    """An input that the stage refuses by name does not have the weights loaded anew; one rank alone does."""
    async with rig(stumble) as rigged:
        processes = ranks(rigged)
        outcome = await rigged.run(fault="refuse")
        assert isinstance(outcome.error, InvalidInput)
        assert not outcome.is_dirty
        assert await rigged.value() == [processes[0], 0, 2]
        alone = await rigged.run(fault="refuse alone", rank=1)
        assert isinstance(alone.error, InvalidInput)
        assert alone.is_dirty
        assert not any(map(is_alive, processes))


async def test_what_every_rank_raises_is_no_refusal() -> None:
    """Which collectives each of them has begun nobody knows: the group is made anew."""
    async with rig(stumble) as rigged:
        processes = ranks(rigged)
        outcome = await rigged.run(fault="raise as all do")
        assert "are not finite" in failure(outcome).message
        assert outcome.is_dirty
        assert not any(map(is_alive, processes))


async def test_a_cancelled_request_releases_all_ranks() -> None:
    """Whatever keeps them: an order to end is not waited for that a rank in a collective cannot hear."""
    async with rig(stumble, PATIENT) as rigged:
        processes = ranks(rigged)
        call = rigged.start(fault="block")
        await until(lambda: rigged.progress)
        call.stop(CANCELLED)
        outcome = await call.task
        assert outcome.error is CANCELLED
        assert outcome.is_dirty
        assert not any(map(is_alive, processes))


async def test_a_rank_that_hangs_past_the_timeout_is_named() -> None:
    """And the others are released with it."""
    async with rig(hurried, PATIENT) as rigged:
        processes = ranks(rigged)
        outcome = await rigged.run(rank=1)
        error = failure(outcome)
        assert "took longer than its timeout of 1.0 s on node-1; of its 2 ranks 1 had not returned" in (
            error.message
        )
        assert outcome.is_dirty
        assert not any(map(is_alive, processes))


async def test_a_deadline_ends_all_ranks() -> None:
    """It is told when it passes, and no process goes on."""
    async with rig(stumble, SHORT) as rigged:
        processes = ranks(rigged)
        outcome = await rigged.run(fault="hang", within=0.5)
        assert outcome.error is rigged.late[0]
        assert "passed its deadline in stage; of its 2 ranks 0, 1 had not returned" in str(outcome.error)
        assert not any(map(is_alive, processes))


async def test_a_rank_that_dies_idle_takes_the_others_along() -> None:
    """A group without one of its ranks is none; whoever watches over it is told how it ended."""
    async with rig(stumble) as rigged:
        processes = ranks(rigged)
        os.kill(processes[1], signal.SIGKILL)
        assert "(rank 1 of 2) was killed by SIGKILL" in await rigged.loaded.broken()
        assert rigged.loaded.is_broken
        assert not any(map(is_alive, processes))


async def test_a_merge_that_fails_is_an_ordinary_error() -> None:
    """All ranks have returned by then, so they stay; one that takes its process along ends the group."""
    async with rig(patch_up) as rigged:
        processes = ranks(rigged)
        assert await rigged.value(how="zero") == "zero+1"
        outcome = await rigged.run(how="raise")
        assert "ValueError: 2 parts do not fit" in failure(outcome).message
        assert "the int 3 where str is wanted" in failure(await rigged.run(how="wrong type")).message
        assert not outcome.is_dirty
        assert await rigged.value(how="zero") == "zero+1"
        assert ranks(rigged) == processes
        dead = await rigged.run(how="_exit")
        assert "its process (rank 0 of 2) exited with status 4" in failure(dead).message
        assert dead.is_dirty
        assert not any(map(is_alive, processes))
