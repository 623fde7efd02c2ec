"""The five stages against the pipeline they were cut from."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepiece import ConfigError, DeadlineExceeded, InvalidInput, RequestCancelled
from onepiece.codec import materialise, pack, unpack
from onepiece.graph import Constant, FromInput, FromStage, check_value
from onepiece.testing import stage_context
from onepiece.types import TypeSpec
from onepiece.workflow import Workflow
from stages import image_to_video as workflow_module
from stages._diffusers import Denoiser, ImageEncoder, LatentEncoder, TextEncoder, _Loader, libraries
from stages._video import read_image, read_mp4, write_mp4
from stages._wan import MODEL_VARIABLE, SHIPPED_MODEL, WanModel

pytestmark = pytest.mark.diffusion
torch = pytest.importorskip("torch", reason="needs the diffusion extra")
pytest.importorskip("diffusers", reason="needs the diffusion extra")

EXAMPLE = (SHIPPED_MODEL / "example.png").read_bytes()
PROMPT = "a red three moving right"
MODEL = workflow_module.MODEL


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    """Nothing here may ask a hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@contextlib.asynccontextmanager
async def loaded_stages(workflow: Workflow[..., Any]) -> AsyncIterator[dict[str, Any]]:
    """The state of every stage of a workflow, loaded as a node does."""
    async with contextlib.AsyncExitStack() as stack:
        yield {
            key: await stack.enter_async_context(stage.loaded(stage_context()))
            for key, stage in workflow.stages.items()
        }


def travel(value: Any, spec: TypeSpec) -> Any:
    """The value as the next worker receives it: packed, sent as bytes, unpacked, materialised."""
    received = bytearray(b"".join(pack(None, {"value": value}).parts))
    wire = unpack(memoryview(received), type(None)).values["value"]
    return materialise(wire, spec, "cpu")


async def run(workflow: Workflow[..., Any], **inputs: Any) -> dict[str, Any]:
    """Run a workflow stage by stage, all values on the wire in between; the output of each node."""
    call = workflow(**inputs)
    outputs: dict[str, Any] = {}
    async with loaded_stages(workflow) as states:
        for node in workflow.graph.nodes:
            stage = workflow.stages[node.stage]
            arguments = {
                name: _given(source, call.inputs, outputs, stage.spec.parameter(name))
                for name, source in node.inputs.items()
            }
            outputs[node.id] = await stage.function(stage_context(states[node.stage]), **arguments)
            assert check_value(stage.spec.returns, outputs[node.id]) is None
    return outputs


def _given(source: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any], parameter: Any) -> Any:
    match source:
        case FromInput():
            value = inputs[source.name]
        case FromStage():
            value = outputs[source.node]
            for step in source.path:
                value = getattr(value, step) if isinstance(step, str) else value[step]
        case Constant():
            return source.value
        case _:
            pytest.fail(f"unknown source {source!r}")
    return travel(value, parameter.type)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over several threads have other last bits: the stages and the whole pipeline take one each."""
    monkeypatch.setenv("ONEPIECE_TORCH_THREADS", "1")
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def monolith() -> Any:
    """The whole pipeline as diffusers loads it, its weights moved to aligned memory."""
    diffusers = libraries().diffusers
    pipeline = diffusers.WanImageToVideoPipeline.from_pretrained(
        str(SHIPPED_MODEL), dtype=torch.float32, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    settle(pipeline)
    return pipeline


def settle(pipeline: Any) -> None:
    """Move the weights of a pipeline out of the mapped files."""
    for network in (pipeline.text_encoder, pipeline.image_encoder, pipeline.vae, pipeline.transformer):
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.data = tensor.data.clone()


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 4, "guidance": 1.0, "seed": 0, "num_frames": 9},
        {"steps": 3, "guidance": 3.0, "seed": 11, "num_frames": 9},
        {"steps": 2, "guidance": 2.0, "seed": 5, "num_frames": 5, "height": 80, "width": 48},
    ],
    ids=["no guidance", "guidance", "another size"],
)
async def test_split_equals_monolith(monolith: Any, options: dict[str, Any]) -> None:
    """Latents and frames are the pipeline's, bit for bit, though every tensor crossed the wire."""
    split = await run(workflow_module.image_to_frames, prompt=PROMPT, image=EXAMPLE, **options)
    call = {
        "image": read_image(EXAMPLE),
        "prompt": PROMPT,
        "height": options.get("height", 64),
        "width": options.get("width", 64),
        "num_frames": options["num_frames"],
        "num_inference_steps": options["steps"],
        "guidance_scale": options["guidance"],
        "max_sequence_length": MODEL.max_sequence_length,
    }

    def whole(output_type: str) -> Any:
        generator = torch.Generator("cpu").manual_seed(options["seed"])
        return monolith(**call, generator=generator, output_type=output_type).frames

    latents = whole("latent")
    assert torch.equal(split["denoise"], latents)
    frames = (whole("np")[0] * 255).round().astype(np.uint8)
    assert np.array_equal(np.asarray(split["decode_frames"]), frames)
    assert frames.std() > 5  # a clip, not a blank that anything would equal


async def test_the_demo_shows_a_three_that_moves_right() -> None:
    """The shipped still and prompt give a clip in which the ink travels 16 pixels to the right."""
    outputs = await run(workflow_module.image_to_frames, prompt=PROMPT, image=EXAMPLE)
    frames = np.asarray(outputs["decode_frames"])
    assert frames.shape == (9, 64, 64, 3)
    ink = frames.max(-1).astype(float)
    ink[ink < 40] = 0
    columns = (ink.sum(1) * np.arange(64)).sum(-1) / ink.sum((1, 2))
    rows = (ink.sum(2) * np.arange(64)).sum(-1) / ink.sum((1, 2))
    assert columns[-1] - columns[0] == pytest.approx(16, abs=1)
    assert rows[-1] - rows[0] == pytest.approx(0, abs=1)
    assert (np.diff(columns) > 1).all()


async def test_the_video_is_the_frames() -> None:
    """``image_to_video`` writes exactly the frames that ``image_to_frames`` returns."""
    video = (await run(workflow_module.image_to_video, prompt=PROMPT, image=EXAMPLE))["decode"]
    frames = (await run(workflow_module.image_to_frames, prompt=PROMPT, image=EXAMPLE))["decode_frames"]
    assert video == write_mp4(np.asarray(frames), MODEL.frames_per_second)
    assert len(read_mp4(video)) == 9


async def test_a_worker_serves_many_requests_alike() -> None:
    """Nothing of a request stays behind in scheduler, cache or random state: again is the same."""
    workflow = workflow_module.image_to_frames
    async with loaded_stages(workflow) as states:
        key = workflow_module.denoise.key
        latents = await workflow_module.encode_latents.function(
            stage_context(states[workflow_module.encode_latents.key]), EXAMPLE
        )
        text = await workflow_module.encode_text.function(
            stage_context(states[workflow_module.encode_text.key]), PROMPT
        )
        image = await workflow_module.encode_image.function(
            stage_context(states[workflow_module.encode_image.key]), EXAMPLE
        )
        first = await workflow_module.denoise.function(stage_context(states[key]), text, image, latents)
        await workflow_module.denoise.function(stage_context(states[key]), text, image, latents, 2)
        again = await workflow_module.denoise.function(stage_context(states[key]), text, image, latents)
    assert torch.equal(first, again)


class Denoising:
    """Inputs of the denoise stage, and the state that runs it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.state = Denoiser.load(MODEL, "cpu")
        self.latents = workflow_module.Latents(
            noise=torch.randn(1, 16, 3, 8, 8, generator=generator),
            condition=torch.randn(1, 20, 3, 8, 8, generator=generator),
        )
        self.text = workflow_module.TextEmbeddings(torch.randn(1, 16, 64, generator=generator), None)
        self.image = torch.randn(1, 17, 64, generator=generator)

    def run(self, steps: int) -> Any:
        """Denoise, without a context."""
        return self.state.denoise(
            *self.latents,
            self.text.prompt,
            None,
            self.image,
            steps=steps,
            guidance=1.0,
            on_step=lambda _: None,
        )


@pytest.fixture(scope="module")
def denoising() -> Denoising:
    """Loaded once for the module."""
    return Denoising()


async def test_denoise_reports_every_step(denoising: Denoising) -> None:
    """Progress starts at 0 and ends at the total, one report a step."""
    context = stage_context(denoising.state)
    await workflow_module.denoise.function(context, denoising.text, denoising.image, denoising.latents, 5)
    assert context.reports == [{"step": step, "total": 5} for step in range(6)]


async def test_a_cancelled_request_ends_at_the_next_step(
    denoising: Denoising, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop stops where it learns of it, and does not run to its end."""
    context = stage_context(denoising.state)
    original = context.report

    def report(**fields: Any) -> None:
        if fields["step"] == 2:
            context.cancel()
        original(**fields)

    monkeypatch.setattr(type(context), "report", lambda self, **fields: report(**fields))
    with pytest.raises(RequestCancelled):
        await workflow_module.denoise.function(
            context, denoising.text, denoising.image, denoising.latents, 50
        )
    assert [each["step"] for each in context.reports] == [0, 1]


async def test_a_request_past_its_deadline_takes_no_step(denoising: Denoising) -> None:
    """The deadline is checked before work is done, too."""
    context = stage_context(denoising.state, timeout=-1)
    with pytest.raises(DeadlineExceeded):
        await workflow_module.denoise.function(context, denoising.text, denoising.image, denoising.latents)
    assert context.reports == []


async def test_denoise_refuses_wrong_options(denoising: Denoising) -> None:
    """Before the first step, by name."""
    for options, field in (((0,), "steps"), ((4, 99.0), "guidance")):
        with pytest.raises(InvalidInput) as caught:
            await workflow_module.denoise.function(
                stage_context(denoising.state), denoising.text, denoising.image, denoising.latents, *options
            )
        assert caught.value.fields["field"] == field


async def test_the_first_stage_that_sees_a_wrong_input_refuses_it() -> None:
    """Each stage checks what it reads: images, sizes, frame counts, prompts."""
    async with loaded_stages(workflow_module.image_to_video) as states:

        def context(stage: Any) -> Any:
            return stage_context(states[stage.key])

        stages = workflow_module
        wrong = [
            ("image", stages.encode_image.function(context(stages.encode_image), b"no image")),
            ("image", stages.encode_latents.function(context(stages.encode_latents), b"no image")),
            ("seed", stages.encode_latents.function(context(stages.encode_latents), EXAMPLE, -1)),
            ("num_frames", stages.encode_latents.function(context(stages.encode_latents), EXAMPLE, 0, 10)),
            ("height", stages.encode_latents.function(context(stages.encode_latents), EXAMPLE, 0, 9, 70)),
            ("prompt", stages.encode_text.function(context(stages.encode_text), "a red three " * 10)),
            ("prompt", stages.encode_text.function(context(stages.encode_text), "x" * 10**6)),
            (
                "negative_prompt",
                stages.encode_text.function(context(stages.encode_text), "a", "a three " * 10, 2.0),
            ),
            ("frames_per_second", stages.decode.function(context(stages.decode), None, 0)),
        ]
        for field, refused in wrong:
            with pytest.raises(InvalidInput) as caught:
                await refused
            assert caught.value.fields["field"] == field


async def test_a_negative_prompt_counts_only_with_guidance() -> None:
    """Without guidance it costs nothing and is not sent on."""
    async with workflow_module.encode_text.loaded(stage_context()) as state:
        without = await workflow_module.encode_text.function(stage_context(state), PROMPT, "a green one", 1.0)
        guided = await workflow_module.encode_text.function(stage_context(state), PROMPT, "a green one", 2.0)
    assert without.negative_prompt is None
    assert torch.equal(without.prompt, guided.prompt)
    assert not torch.equal(guided.prompt, guided.negative_prompt)


def test_each_stage_loads_its_own_components_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that encodes text never touches the weights of the transformer."""
    encoder = TextEncoder.load(MODEL, "cpu:0")
    held = {name for name, part in encoder._pipeline.components.items() if part is not None}
    assert held == {"tokenizer", "text_encoder"}


def test_weights_lie_aligned_and_need_no_gradient(denoising: Denoising) -> None:
    """Mapped files put weights at any offset, which changes the last bits of the result."""
    parameters = list(denoising.state._transformer.parameters())
    assert all(parameter.data_ptr() % 64 == 0 for parameter in parameters)
    assert not any(parameter.requires_grad for parameter in parameters)
    assert {parameter.dtype for parameter in parameters} == {torch.float32}


def test_loading_sets_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads a stage gets the thread count that ``choose_threads`` gives."""
    monkeypatch.setenv("ONEPIECE_TORCH_THREADS", "2")
    before = torch.get_num_threads()
    try:
        TextEncoder.load(MODEL, "cpu")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def half_precision_model(tmp_path: Path) -> WanModel:
    """The shipped weights, served as the large models are: text encoder and transformer in bfloat16."""
    for path in SHIPPED_MODEL.iterdir():
        (tmp_path / path.name).symlink_to(path)
    settings = json.loads((SHIPPED_MODEL / "serving.json").read_text())
    (tmp_path / "serving.json").unlink()
    (tmp_path / "serving.json").write_text(json.dumps({**settings, "dtype": "bfloat16"}))
    return WanModel.from_source(str(tmp_path))


def test_split_equals_monolith_in_half_precision(half_precision_model: WanModel) -> None:
    """In the types in which upstream runs the large models: bfloat16, image encoder and VAE float32."""
    model, source = half_precision_model, half_precision_model.source
    text_encoder, image_encoder = TextEncoder.load(model, "cpu"), ImageEncoder.load(model, "cpu")
    latent_encoder, denoiser = LatentEncoder.load(model, "cpu"), Denoiser.load(model, "cpu")
    image = read_image(EXAMPLE)
    prompt, negative_prompt = text_encoder.encode(PROMPT, "", guided=True)
    seen = image_encoder.encode(image)
    assert {prompt.dtype, seen.dtype} == {torch.bfloat16}
    noise, condition = latent_encoder.encode(image, height=64, width=64, num_frames=9, seed=3)
    assert {noise.dtype, condition.dtype} == {torch.float32}
    latents = denoiser.denoise(
        noise, condition, prompt, negative_prompt, seen, steps=3, guidance=2.0, on_step=lambda _: None
    )
    packages = libraries()
    pipeline = packages.pipeline.from_pretrained(
        source,
        image_encoder=packages.image_encoder.from_pretrained(
            source, subfolder="image_encoder", dtype=torch.float32
        ),
        vae=packages.vae.from_pretrained(source, subfolder="vae", torch_dtype=torch.float32),
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    pipeline.set_progress_bar_config(disable=True)
    settle(pipeline)
    whole = pipeline(
        image=image,
        prompt=PROMPT,
        height=64,
        width=64,
        num_frames=9,
        num_inference_steps=3,
        guidance_scale=2.0,
        generator=torch.Generator("cpu").manual_seed(3),
        max_sequence_length=model.max_sequence_length,
        output_type="latent",
    ).frames
    assert torch.equal(latents, whole)


def test_loading_does_not_disturb_computing(denoising: Denoising) -> None:
    """What computes beside a load waits for it: meanwhile torch's default type is another one."""
    computed = threading.Event()

    def compute() -> Any:
        latents = denoising.run(steps=2)
        computed.set()
        return latents

    alone = compute()
    computed.clear()

    with ThreadPoolExecutor() as pool:
        beside: list[Future[Any]] = []

        class Loads:
            """Changes what from_pretrained changes, for long enough that the other thread would see it."""

            @staticmethod
            def from_pretrained(*_: Any, **__: Any) -> None:
                torch.set_default_dtype(torch.bfloat16)
                try:
                    beside.append(pool.submit(compute))
                    assert not computed.wait(0.5)
                finally:
                    torch.set_default_dtype(torch.float32)

        _Loader.start(MODEL, "cpu").plain(Loads, "transformer")
        assert torch.equal(beside[0].result(), alone)


@pytest.mark.slow
def test_a_hub_id_is_read_from_the_hubs_cache(tmp_path: Path) -> None:
    """A model named by hub id loads, and each stage asks for the files of its own components alone."""
    snapshot = tmp_path / "models--somebody--small-wan" / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    for name in ("tokenizer", "text_encoder"):
        (snapshot / name).symlink_to(SHIPPED_MODEL / name)
    refs = tmp_path / "models--somebody--small-wan" / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    code = """
from onepiece import ConfigError
from stages._diffusers import Decoder, TextEncoder
from stages._wan import WanModel
model = WanModel.from_environment()
assert not model.is_local
prompt, _ = TextEncoder.load(model, "cpu").encode("a red three", "", guided=False)
print(tuple(prompt.shape), prompt.dtype)
try:
    Decoder.load(model, "cpu")
except ConfigError as error:
    print(error)
"""
    environment = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", MODEL_VARIABLE: "somebody/small-wan"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "(1, 512, 64) torch.bfloat16" in result.stdout
    assert "cannot load vae of model 'somebody/small-wan'" in result.stdout


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    """A folder without the component says which, and of which model."""
    (tmp_path / "model_index.json").write_text("{}")
    model = WanModel.from_source(os.fspath(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot load (tokenizer|text_encoder) of model"):
        TextEncoder.load(model, "cpu")
