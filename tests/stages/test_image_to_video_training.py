"""The training of the shipped model: its data, its shortcuts, and that every step runs."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages._diffusers import limit_threads
from stages._wan import SHIPPED_MODEL

pytestmark = pytest.mark.diffusion
torch = pytest.importorskip("torch", reason="needs the diffusion extra")
pytest.importorskip("diffusers", reason="needs the diffusion extra")
pytest.importorskip("sklearn", reason="needs scikit-learn, whose digits are the data")

from PIL import Image  # noqa: E402 - behind the checks that it is there

from stages.training import autoencoder, evaluation, networks, transformer  # noqa: E402 - as above
from stages.training.digits import (  # noqa: E402 - as above
    MOVES,
    TRAINING_DIGITS,
    Scene,
    centre,
    nearest_move,
    random_scene,
)
from stages.training.still import RED_THREE  # noqa: E402 - as above


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """As the command sets it: OpenMP's threads spin, and on a busy machine that is all they do."""
    limit_threads()


def test_digits_move_as_the_prompt_says() -> None:
    """Sixteen pixels over a clip, in the direction of the prompt, from the same first frame."""
    firsts = set[bytes]()
    for move, (dx, dy) in MOVES.items():
        frames = Scene(digit=3, colour="white", move=move, x=20, y=20).frames()
        shift = centre(frames[-1]) - centre(frames[0])
        assert shift == pytest.approx([16 * dx, 16 * dy], abs=0.01)
        assert nearest_move(shift) == move
        firsts.add(frames[0].tobytes())
    assert len(firsts) == 1


def test_held_out_digits_are_never_trained_on() -> None:
    """The two draws share no digit, and both use all colours and moves."""
    rng = np.random.default_rng(0)
    trained = [random_scene(rng) for _ in range(500)]
    held_out = [random_scene(rng, held_out=True) for _ in range(500)]
    assert max(scene.digit for scene in trained) < TRAINING_DIGITS
    assert min(scene.digit for scene in held_out) >= TRAINING_DIGITS
    for scenes in (trained, held_out):
        assert len({(scene.colour, scene.move) for scene in scenes}) == 25


def test_the_example_is_the_still_that_the_training_draws() -> None:
    """The shipped first frame can be made again, and shows a digit that was held out."""
    with Image.open(io.BytesIO((SHIPPED_MODEL / "example.png").read_bytes())) as image:
        assert np.array_equal(np.asarray(image.convert("RGB")), RED_THREE.frames(1)[0])
    assert RED_THREE.prompt == "a red three moving right"
    assert RED_THREE.digit >= TRAINING_DIGITS


def test_the_tokenizer_is_the_shipped_one() -> None:
    """Made anew, it gives every known prompt the ids that the weights were trained with."""
    from tokenizers import Tokenizer

    made = networks.make_tokenizer()
    shipped = Tokenizer.from_file(str(SHIPPED_MODEL / "tokenizer" / "tokenizer.json"))
    for prompt in ("a red three moving right", "A BLUE nine standing still", "a dog", ""):
        ids = made(prompt, padding="max_length", max_length=networks.PROMPT_TOKENS, truncation=True)[
            "input_ids"
        ]
        assert ids == shipped.encode(prompt).ids


@pytest.mark.parametrize(
    ("component", "make"),
    [
        ("vae", networks.make_autoencoder),
        ("transformer", networks.make_transformer),
        ("text_encoder", lambda: networks.make_conditioners(26).text),
        ("image_encoder", lambda: networks.make_conditioners(26).image),
    ],
)
def test_the_shipped_weights_fit_the_networks(component: str, make: Any) -> None:
    """Name by name and shape by shape: the training makes the very model that is shipped."""
    from safetensors.torch import load_file

    (path,) = (SHIPPED_MODEL / component).glob("*.safetensors")
    shipped = {name: tensor.shape for name, tensor in load_file(path).items()}
    made = {name: tensor.shape for name, tensor in make().state_dict().items()}
    assert shipped.items() <= made.items()
    tied = {name for name in made if "position_ids" in name or "embed_tokens" in name}
    assert made.keys() - shipped.keys() <= tied


def test_two_chunks_are_as_exact_as_many() -> None:
    """The shortcut through the autoencoder equals diffusers' own way."""
    vae = networks.load_pipeline(SHIPPED_MODEL).vae
    clips = networks.as_clips([RED_THREE.frames(), random_scene(np.random.default_rng(5)).frames()])
    with torch.no_grad():
        latents = networks.encode_clips(vae, clips)
        assert torch.equal(latents, vae.encode(clips).latent_dist.mode())
        assert torch.equal(networks.decode_latents(vae, latents).clamp(-1, 1), vae.decode(latents).sample)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_step_runs(tmp_path: Path) -> None:
    """From nothing to a measured pipeline, far too short to be good; the folder can be served as it is."""
    autoencoder.train(tmp_path, minutes=0.01)
    autoencoder.train(tmp_path, minutes=0.01, resume_at=0.9)
    for part in range(2):
        transformer.encode_training_clips(tmp_path, part=part, parts=2, clips=20)
    transformer.train(tmp_path, minutes=0.01)
    figures = evaluation.evaluate(tmp_path / "pipeline", tmp_path, clips=3, steps=1, guidance=1.0)
    assert figures["clips"] == 3
    steps = [json.loads(line) for line in (tmp_path / "dit.jsonl").read_text().splitlines()]
    assert steps[-1]["final"]
    assert steps[-1]["step"] >= 1
    shipped = {
        path.relative_to(SHIPPED_MODEL) for path in SHIPPED_MODEL.rglob("*") if path.parent != SHIPPED_MODEL
    }
    made = {path.relative_to(tmp_path / "pipeline") for path in (tmp_path / "pipeline").rglob("*")}
    assert shipped <= made
    assert str(tmp_path) not in (tmp_path / "pipeline" / "vae" / "config.json").read_text()


def test_the_shipped_model_does_what_its_card_says(tmp_path: Path) -> None:
    """On held-out digits: at least 28 dB, every direction right, every prompt followed."""
    figures = evaluation.evaluate(SHIPPED_MODEL, tmp_path, clips=6, steps=3, guidance=1.0)
    assert isinstance(figures["decibels"], float)
    assert figures["decibels"] > 28
    assert figures["right_direction"] == 1
    assert figures["one_image_five_prompts_right"] == 5
