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


def test_without_a_backend_the_group_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for processors alone has no nccl."""
    distributed = SimpleNamespace(
        is_available=lambda: True, is_backend_available=lambda backend: backend != "nccl"
    )
    torch = SimpleNamespace(__version__="2.0", distributed=distributed)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(ConfigError, match="has no nccl"):
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
