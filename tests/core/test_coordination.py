import os
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from attrs import evolve

from onepiece.coordination import open_embedded
from onepiece.core import ManagerState
from onepiece.errors import ConfigError, LeadershipLost, OnePieceError
from tests.core.cluster import make_need, make_workflow

_STORES_FOR_EVER = """
import sys
from pathlib import Path
import anyio
from attrs import evolve
from onepiece.coordination import open_embedded

async def main():
    async with open_embedded(Path(sys.argv[1])) as coordinator:
        state = await coordinator.lead()
        while True:
            state = evolve(state, next_actor_id=state.next_actor_id + 1)
            await coordinator.store(state)
            print(state.epoch, state.next_actor_id, flush=True)

anyio.run(main)
"""


async def test_state_outlives_the_manager(tmp_path: Path) -> None:
    """The next manager gets what was stored, under a higher epoch."""
    workflows = (
        make_workflow("stills", make_need("paint")),
        make_workflow("video", make_need("denoise", 40)),
    )
    async with open_embedded(tmp_path) as coordinator:
        first = await coordinator.lead()
        assert first == ManagerState(epoch=1)
        await coordinator.store(evolve(first, next_actor_id=65, workflows=workflows))
    async with open_embedded(tmp_path) as coordinator:
        assert await coordinator.lead() == ManagerState(2, 65, workflows)


async def test_what_was_withdrawn_is_gone(tmp_path: Path) -> None:
    """A stored state replaces the one before, and keeps nothing of it."""
    async with open_embedded(tmp_path) as coordinator:
        state = await coordinator.lead()
        await coordinator.store(evolve(state, workflows=(make_workflow("video", make_need("denoise")),)))
        await coordinator.store(evolve(state, workflows=()))
    async with open_embedded(tmp_path) as coordinator:
        assert (await coordinator.lead()).workflows == ()


async def test_each_life_has_a_higher_epoch(tmp_path: Path) -> None:
    """The epoch grows with each leadership even if nothing was stored in between."""
    epochs = []
    for _ in range(3):
        async with open_embedded(tmp_path) as coordinator:
            epochs.append((await coordinator.lead()).epoch)
    assert epochs == [1, 2, 3]


async def test_in_memory_it_lasts_as_long_as_the_object() -> None:
    """Without a directory the state is kept while the coordinator is open."""
    async with open_embedded(None) as coordinator:
        state = evolve(await coordinator.lead(), next_actor_id=9)
        await coordinator.store(state)
        assert await coordinator.lead() == evolve(state, epoch=2)


async def test_who_does_not_lead_stores_nothing(tmp_path: Path) -> None:
    """Before ``lead`` and after the end a store is refused, and the file is as it was."""
    async with open_embedded(tmp_path) as coordinator:
        with pytest.raises(LeadershipLost):
            await coordinator.store(ManagerState(epoch=1, next_actor_id=99))
        state = await coordinator.lead()
    with pytest.raises(LeadershipLost):
        await coordinator.store(evolve(state, next_actor_id=99))
    async with open_embedded(tmp_path) as again:
        assert (await again.lead()).next_actor_id == 1


async def test_numbers_never_fall(tmp_path: Path) -> None:
    """A state that would let actor ids be used twice is our own bug, and is not written."""
    async with open_embedded(tmp_path) as coordinator:
        state = evolve(await coordinator.lead(), next_actor_id=65)
        await coordinator.store(state)
        with pytest.raises(AssertionError, match="never used twice"):
            await coordinator.store(evolve(state, next_actor_id=64))


async def test_the_directory_has_one_owner(tmp_path: Path) -> None:
    """A second manager on the same directory is told who has it; later it may have it."""
    async with open_embedded(tmp_path):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            async with open_embedded(tmp_path):
                raise AssertionError("two managers own one directory")
    async with open_embedded(tmp_path) as coordinator:
        assert (await coordinator.lead()).epoch == 1


async def test_end_of_the_leadership_is_told() -> None:
    """Whoever waits for the loss is woken when the coordinator is closed."""
    woken = anyio.Event()

    async with anyio.create_task_group() as tasks:
        async with open_embedded(None) as coordinator:
            await coordinator.lead()

            async def wait() -> None:
                await coordinator.wait_lost()
                woken.set()

            tasks.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            assert not woken.is_set()
        await woken.wait()


async def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    """A damaged file is an error with its path and a way out, not a crash or a fresh start."""
    (tmp_path / "data.mdb").write_bytes(b"this is no database" * 1000)
    with pytest.raises(ConfigError, match="cannot be opened"):
        async with open_embedded(tmp_path) as coordinator:
            await coordinator.lead()


async def test_unusable_directory_is_named(tmp_path: Path) -> None:
    """A path that is no directory is an error that names it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="unusable"):
        async with open_embedded(tmp_path / "file"):
            raise AssertionError("a file was used as a directory")


@pytest.mark.parametrize("acknowledged", [1, 5, 20])
async def test_kill_loses_nothing_acknowledged(tmp_path: Path, acknowledged: int) -> None:
    """A process killed in the middle of storing leaves at least what it was told is stored (fault 35)."""
    epoch, last = await anyio.to_thread.run_sync(_store_until_killed, tmp_path, acknowledged)
    async with open_embedded(tmp_path) as coordinator:
        state = await coordinator.lead()
    assert state.epoch == epoch + 1
    assert last <= state.next_actor_id <= last + 1


def _store_until_killed(directory: Path, acknowledged: int) -> tuple[int, int]:
    """Kill a storing process after so many acknowledgements; the last one it gave (epoch, next id)."""
    command = [sys.executable, "-c", _STORES_FOR_EVER, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(acknowledged)]
        process.kill()
        seen += [line for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    epoch, next_actor_id = map(int, seen[-1].split())
    return epoch, next_actor_id


def test_the_error_survives_the_wire() -> None:
    """``LeadershipLost`` is built again from its wire form."""
    error = LeadershipLost("gone", epoch=3)
    assert isinstance(OnePieceError.from_wire(error.to_wire()), LeadershipLost)
