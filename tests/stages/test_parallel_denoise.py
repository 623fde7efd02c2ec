"""The stage whose devices share a request: what of it needs no second process."""

import sys
from types import SimpleNamespace

import pytest

from onepiece import _torch
from onepiece.errors import ConfigError, InvalidInput
from onepiece.testing import stage_context
from stages.parallel_denoise import TOKENS_MAX, Share, denoise_alone, draw_noise


@pytest.mark.diffusion
def test_shares_make_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is in the share of one rank, and the gathered ones stand in the order of the sequence.

    Whatever the number of ranks is, also where it divides no number of tokens.
    """
    torch = pytest.importorskip("torch")
    for length in (5, 6, 7, 8):
        whole = torch.arange(2.0 * length * 3).reshape(2, length, 3)
        for world_size in (1, 2, 3, 5):
            shares = [Share(rank, world_size) for rank in range(world_size)]
            parts = [share.of(whole) for share in shares]
            longest = max(part.shape[1] for part in parts)

            def all_gather(everyone: list[object], padded: object, group: object) -> None:
                for into, part in zip(everyone, parts, strict=True):  # noqa: B023 - called in this round
                    into[:, : part.shape[1]] = part  # type: ignore[index]  # a tensor
                    into[:, part.shape[1] :] = float("nan")  # type: ignore[index]  # a tensor
                assert padded.shape[1] == longest  # type: ignore[attr-defined]  # noqa: B023 - the same

            monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
            for share, part in zip(shares, parts, strict=True):
                assert torch.equal(share.gathered(part, length), whole)


def test_without_torch_the_group_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that asks for its group where torch is not installed is told what to install."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[diffusion\]'"):
        _torch.join_group("cpu", 0, 0, 2)


def test_the_kind_of_device_decides_what_ranks_talk_through() -> None:
    """Nothing else is guessed: a kind that is not known is refused."""
    assert [_torch.backend_for(device) for device in ("cpu", "cpu:3", "cuda", "cuda:7")] == [
        *("gloo", "gloo"),
        *("nccl", "nccl"),
    ]
    with pytest.raises(ConfigError, match="'mps:0' is neither"):
        _torch.backend_for("mps:0")


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:1", "nccl")])
def test_a_group_is_made_for_the_ranks_own_device(
    device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU becomes the process's own one first, and is named to the group; a processor is not."""
    said: list[tuple[str, object]] = []
    distributed = SimpleNamespace(
        is_available=lambda: True,
        is_backend_available=lambda _: True,
        FileStore=lambda path, size: (path, size),
        init_process_group=lambda name, **how: said.append((name, how)),
        group=SimpleNamespace(WORLD="all of them"),
    )
    torch = SimpleNamespace(
        distributed=distributed,
        device=lambda name: f"device {name}",
        cuda=SimpleNamespace(set_device=lambda where: said.append(("set_device", where))),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert _torch.join_group(device, 7, 1, 2) == "all of them"
    where = f"device {device}" if backend == "nccl" else None
    made = {"store": ("/proc/self/fd/7", 2), "rank": 1, "world_size": 2, "device_id": where}
    assert said == [*([("set_device", where)] if where else []), (backend, made)]


def test_without_a_backend_the_group_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for processors alone has no nccl."""
    distributed = SimpleNamespace(
        is_available=lambda: True, is_backend_available=lambda backend: backend != "nccl"
    )
    torch = SimpleNamespace(__version__="2.0", distributed=distributed)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(ConfigError, match=r"has no nccl.* on cuda:0: install one built for CUDA"):
        _torch.join_group("cuda:0", 0, 0, 2)


async def test_inputs_are_refused_by_name() -> None:
    """Before anything is drawn or computed."""
    for tokens, seed, field in ((1, 0, "tokens"), (TOKENS_MAX + 1, 0, "tokens"), (8, -1, "seed")):
        with pytest.raises(InvalidInput) as refused:
            await draw_noise.function(stage_context(), tokens, seed)
        assert refused.value.fields["field"] == field
    noise = await draw_noise.function(stage_context(), 8, 1)
    with pytest.raises(InvalidInput, match="steps is 0"):
        await denoise_alone.function(stage_context(), noise, 0)  # type: ignore[arg-type]  # never looked at
