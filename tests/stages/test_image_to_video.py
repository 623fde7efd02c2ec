"""The workflow's graph, the model's settings, and what is refused: all without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from onepiece import ConfigError, InvalidInput
from onepiece.graph import FromInput, FromStage, ResourceKind
from stages import _wan
from stages._diffusers import choose_threads
from stages._wan import MODEL_VARIABLE, SHIPPED_MODEL, WanModel
from stages.image_to_video import image_to_frames, image_to_video

KNOWN_480P = "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"
SHIPPED = WanModel.from_environment({})


def test_the_graph_is_three_encoders_joined_by_denoise() -> None:
    """The encoders need nothing of each other; denoise joins all three; decode gives the video."""
    graph = image_to_video.graph
    needs = {
        node.id: {source.node for source in node.inputs.values() if isinstance(source, FromStage)}
        for node in graph.nodes
    }
    assert needs == {
        "encode_text": set(),
        "encode_image": set(),
        "encode_latents": set(),
        "denoise": {"encode_text", "encode_image", "encode_latents"},
        "decode": {"denoise"},
    }
    assert graph.output == FromStage("decode")
    assert str(graph.returns) == "bytes"


def test_every_input_reaches_a_stage() -> None:
    """No input of the workflows is accepted and then ignored."""
    for workflow in (image_to_video, image_to_frames):
        used = {
            source.name
            for node in workflow.graph.nodes
            for source in node.inputs.values()
            if isinstance(source, FromInput)
        }
        assert used == {parameter.name for parameter in workflow.graph.inputs}


def test_the_graph_is_read_without_torch() -> None:
    """Proxies and the command line import the workflow in a fraction of the time that torch takes."""
    heavy = ("torch", "diffusers", "transformers", "av", "PIL")
    code = f"import sys, stages.image_to_video; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


def test_the_shipped_model_is_the_default() -> None:
    """Without the variable, and with an empty one, the workflow serves the weights in the package."""
    assert SHIPPED.source == str(SHIPPED_MODEL)
    assert WanModel.from_environment({MODEL_VARIABLE: ""}) == SHIPPED
    assert SHIPPED.is_local
    specs = image_to_video.graph.stages.values()
    assert {spec.resources.kind for spec in specs} == {ResourceKind.CPU}
    assert all(spec.resources.memory_bytes > 0 for spec in specs)


def test_known_hub_ids_have_their_own_settings() -> None:
    """The large models differ in size, and ask for graphics memory that holds their weights."""
    small = WanModel.from_source(KNOWN_480P)
    large = WanModel.from_source("Wan-AI/Wan2.1-I2V-14B-720P-Diffusers")
    assert (small.height, small.width) == (480, 832)
    assert (large.height, large.width) == (720, 1280)
    for model in (small, large):
        assert model.device == "gpu"
        assert model.max_sequence_length == 512
        assert model.memory_gib["denoise"] > 2 * 16.4e9 / 2**30
        assert not model.is_local


def test_a_folder_may_say_how_it_is_served(tmp_path: Path) -> None:
    """``serving.json`` overrides single settings; the rest is as for the large models."""
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "serving.json").write_text(json.dumps({"steps": 7}))
    model = WanModel.from_source(str(tmp_path))
    assert model.steps == 7
    assert model.max_sequence_length == 512


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "no JSON"),
        ("[1]", "object"),
        ('{"stepps": 7}', "stepps"),
        ('{"steps": "many"}', "steps"),
        ('{"steps": true}', "steps"),
        ('{"dtype": "int3"}', "int3"),
        ('{"device": "tpu"}', "tpu"),
        ('{"memory_gib": {"denoise": 1}}', "memory_gib"),
    ],
)
def test_unusable_settings_are_named(tmp_path: Path, content: str, complaint: str) -> None:
    """A mistake in ``serving.json`` is a ConfigError that names the file and the setting."""
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "serving.json").write_text(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        WanModel.from_source(str(tmp_path))
    assert "serving.json" in caught.value.message


def test_a_wrong_model_is_named(tmp_path: Path) -> None:
    """Neither a typing mistake nor an empty folder is taken for a model."""
    for source in ("no-such-folder", "/no/such/folder", "a/b/c", str(tmp_path)):
        with pytest.raises(ConfigError, match=MODEL_VARIABLE):
            WanModel.from_source(source)


@pytest.mark.parametrize("steps", [0, -1, 101, 10**9])
def test_steps_out_of_range(steps: int) -> None:
    """A step count the model was not made for is refused by name."""
    with pytest.raises(InvalidInput, match="steps must be from 1 to 100") as caught:
        SHIPPED.check_steps(steps)
    assert caught.value.fields == {"field": "steps"}


@pytest.mark.parametrize("frames", [0, 2, 8, 10, 37])
def test_frames_must_be_one_more_than_a_multiple_of_four(frames: int) -> None:
    """The VAE makes 1, 5, 9, ... frames; others are refused, not rounded."""
    with pytest.raises(InvalidInput, match="num_frames"):
        SHIPPED.check_frames(frames)


def test_a_wrong_frame_count_says_which_are_right() -> None:
    """The message names the two nearest counts."""
    with pytest.raises(InvalidInput, match="not 10; the nearest are 9 and 13"):
        SHIPPED.check_frames(10)


@pytest.mark.parametrize(
    ("height", "width", "complaint"),
    [
        (65, 64, "height must be a multiple of 16, not 65; the nearest are 64 and 80"),
        (64, 72, "width must be a multiple of 16"),
        (0, 64, "height"),
        (64, -16, "width"),
        (512, 512, "at most 65536 pixels"),
    ],
)
def test_sizes_out_of_range(height: int, width: int, complaint: str) -> None:
    """A size that the networks cannot make, or that would use up the memory, is refused."""
    with pytest.raises(InvalidInput, match=complaint):
        SHIPPED.video_size((64, 64), height, width)


def test_large_models_keep_the_images_proportions() -> None:
    """The default size has the model's area, the image's aspect, and multiples of 16."""
    model = WanModel.from_source(KNOWN_480P)
    assert model.video_size((1664, 960), None, None) == (480, 832)
    height, width = model.video_size((1000, 1000), None, None)
    assert height == width == 624
    assert model.video_size((1000, 1000), 480, 832) == (480, 832)
    assert SHIPPED.video_size((300, 100), None, None) == (64, 64)


@pytest.mark.parametrize("guidance", [-0.1, 31.0, float("nan"), float("inf")])
def test_guidance_out_of_range(guidance: float) -> None:
    """Not-a-number would silently make black frames; it is refused like any other value."""
    with pytest.raises(InvalidInput, match="guidance"):
        SHIPPED.check_guidance(guidance)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_out_of_range(seed: int) -> None:
    """Seeds that torch would refuse or wrap around are refused by name."""
    with pytest.raises(InvalidInput, match="seed"):
        SHIPPED.check_seed(seed)


def test_defaults_are_the_models_own() -> None:
    """None means what the model was made for; what is given is taken as it is."""
    assert (SHIPPED.check_steps(None), SHIPPED.check_steps(9)) == (4, 9)
    assert (SHIPPED.check_frames(None), SHIPPED.check_frames(5)) == (9, 5)
    assert (SHIPPED.check_guidance(None), SHIPPED.check_guidance(3.0)) == (1.0, 3.0)
    assert (SHIPPED.check_frame_rate(None), SHIPPED.check_frame_rate(24)) == (8, 24)
    assert SHIPPED.check_seed(5) == 5


def test_a_megabyte_of_prompt_is_refused_unread() -> None:
    """Before any tokenizer sees it."""
    with pytest.raises(InvalidInput, match="prompt has 1000000 characters"):
        SHIPPED.check_prompt("prompt", "x" * 1_000_000)


@pytest.mark.parametrize(
    ("cores", "environ", "threads"),
    [
        (1, {}, 1),
        (2, {}, 1),
        (15, {}, 1),
        (64, {}, 4),
        (64, {"OMP_NUM_THREADS": "2"}, 2),
        (2, {"OMP_NUM_THREADS": "2", "ONEPIECE_TORCH_THREADS": "3"}, 3),
    ],
)
def test_threads_of_a_worker(cores: int, environ: dict[str, str], threads: int) -> None:
    """One thread on few cores; what the operator says wins."""
    assert choose_threads(cores, environ) == threads


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_wrong_number_of_threads_is_named(text: str) -> None:
    """A mistyped variable is an error, not one thread."""
    with pytest.raises(ConfigError, match="ONEPIECE_TORCH_THREADS"):
        choose_threads(2, {"ONEPIECE_TORCH_THREADS": text})


def test_the_weights_are_all_there() -> None:
    """A component whose files were lost in packaging is missed here, not on the first request."""
    index = json.loads((SHIPPED_MODEL / "model_index.json").read_text())
    components = {name for name, value in index.items() if isinstance(value, list) and value[0]}
    assert components == {path.name for path in SHIPPED_MODEL.iterdir() if path.is_dir()}
    weights = list(SHIPPED_MODEL.rglob("*.safetensors"))
    assert len(weights) == 4
    assert sum(path.stat().st_size for path in weights) > 6_000_000


def test_bounds_fit_each_other() -> None:
    """The defaults of every known model lie within its own bounds."""
    for model in (SHIPPED, *map(WanModel.from_source, _wan._KNOWN)):
        assert model.check_frames(None) <= model.max_frames
        assert model.check_steps(None) <= model.max_steps
        model.video_size((model.width, model.height), None, None)
