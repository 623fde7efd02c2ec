r"""Image-to-video: a still image and a prompt become a clip, over five stages.

::

    prompt --> encode_text ----\
    image ---> encode_image ----> denoise ---> decode ---> mp4
          \--> encode_latents --/

The three encoders need nothing of each other and run at the same time on different workers; denoise
waits for all three. The components are those of diffusers' ``WanImageToVideoPipeline``, and with the
same seed the frames equal that pipeline's, bit for bit.

``ONEPIECE_WAN_MODEL`` names the model, a folder or a hub id; unset, it is the small one that is shipped
(64x64 pixels, 9 frames, moving digits: ``stages/weights/tinywan/README.md``). What the stages ask of a
device depends on the model, and the workflow's digest on that, so that nodes which disagree about the
model refuse each other.

Inputs left at None take the model's own default.
"""

from collections.abc import AsyncIterator
from typing import Final, NamedTuple

from onepiece import Cpu, Gpu, StageContext, Tensor, stage, workflow
from stages._diffusers import Decoder, Denoiser, ImageEncoder, LatentEncoder, TextEncoder
from stages._video import read_image, write_mp4
from stages._wan import WanModel

MODEL: Final = WanModel.from_environment()


def _resources(stage_name: str) -> Cpu | Gpu:
    memory_gib = MODEL.memory_gib[stage_name]
    return Gpu(memory_gib=memory_gib) if MODEL.device == "gpu" else Cpu(memory_gib=memory_gib)


class TextEmbeddings(NamedTuple):
    """What the prompts say. The negative one is missing if guidance is off."""

    prompt: Tensor
    negative_prompt: Tensor | None


class Latents(NamedTuple):
    """Where denoising starts, and what is joined to the input of each of its steps."""

    noise: Tensor
    condition: Tensor


async def load_text_encoder(ctx: StageContext[None]) -> AsyncIterator[TextEncoder]:
    """Tokenizer and text encoder."""
    yield await ctx.run(TextEncoder.load, MODEL, ctx.device)


async def load_image_encoder(ctx: StageContext[None]) -> AsyncIterator[ImageEncoder]:
    """Image processor and image encoder."""
    yield await ctx.run(ImageEncoder.load, MODEL, ctx.device)


async def load_latent_encoder(ctx: StageContext[None]) -> AsyncIterator[LatentEncoder]:
    """The VAE."""
    yield await ctx.run(LatentEncoder.load, MODEL, ctx.device)


async def load_denoiser(ctx: StageContext[None]) -> AsyncIterator[Denoiser]:
    """Transformer and scheduler."""
    yield await ctx.run(Denoiser.load, MODEL, ctx.device)


async def load_decoder(ctx: StageContext[None]) -> AsyncIterator[Decoder]:
    """The VAE."""
    yield await ctx.run(Decoder.load, MODEL, ctx.device)


@stage(resources=_resources("encode_text"), setup=load_text_encoder)
async def encode_text(
    ctx: StageContext[TextEncoder], prompt: str, negative_prompt: str = "", guidance: float | None = None
) -> TextEmbeddings:
    """Embed the prompt and, if guidance is on, the negative prompt."""
    guided = MODEL.check_guidance(guidance) > 1
    encoder = ctx.state
    return TextEmbeddings(*await ctx.run(lambda: encoder.encode(prompt, negative_prompt, guided=guided)))


@stage(resources=_resources("encode_image"), setup=load_image_encoder)
async def encode_image(ctx: StageContext[ImageEncoder], image: bytes) -> Tensor:
    """Embed the image for the transformer's cross-attention."""
    encoder = ctx.state
    return await ctx.run(lambda: encoder.encode(read_image(image)))


@stage(resources=_resources("encode_latents"), setup=load_latent_encoder)
async def encode_latents(
    ctx: StageContext[LatentEncoder],
    image: bytes,
    seed: int = 0,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
) -> Latents:
    """Encode the image as the first frame, and draw the noise."""
    encoder = ctx.state
    seed, num_frames = MODEL.check_seed(seed), MODEL.check_frames(num_frames)

    def encode() -> Latents:
        picture = read_image(image)
        rows, columns = MODEL.video_size(picture.size, height, width)
        return Latents(*encoder.encode(picture, height=rows, width=columns, num_frames=num_frames, seed=seed))

    return await ctx.run(encode)


@stage(resources=_resources("denoise"), setup=load_denoiser)
async def denoise(
    ctx: StageContext[Denoiser],
    text: TextEmbeddings,
    image: Tensor,
    latents: Latents,
    steps: int | None = None,
    guidance: float | None = None,
) -> Tensor:
    """Take the noise away, step by step. Reports each step; a cancelled request ends at the next one."""
    total, scale = MODEL.check_steps(steps), MODEL.check_guidance(guidance)
    denoiser = ctx.state

    def run() -> Tensor:
        return denoiser.denoise(
            latents.noise,
            latents.condition,
            text.prompt,
            text.negative_prompt,
            image,
            steps=total,
            guidance=scale,
            on_step=lambda step: ctx.report(step=step, total=total),
        )

    return await ctx.run(run)


@stage(resources=_resources("decode"), setup=load_decoder)
async def decode(ctx: StageContext[Decoder], latents: Tensor, frames_per_second: int | None = None) -> bytes:
    """Turn latents into an mp4."""
    rate = MODEL.check_frame_rate(frames_per_second)
    decoder = ctx.state
    return await ctx.run(lambda: write_mp4(decoder.decode(latents), rate))


@stage(resources=_resources("decode"), setup=load_decoder)
async def decode_frames(ctx: StageContext[Decoder], latents: Tensor) -> Tensor:
    """Turn latents into frames: uint8 [frames, height, width, 3], nothing lost to a video codec."""
    decoder = ctx.state
    return await ctx.run(lambda: decoder.decode(latents))


@workflow
def image_to_video(
    prompt: str,
    image: bytes,
    negative_prompt: str = "",
    steps: int | None = None,
    guidance: float | None = None,
    seed: int = 0,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
    frames_per_second: int | None = None,
) -> bytes:
    """A clip that starts with ``image`` and does what ``prompt`` says, as mp4."""
    text = encode_text(prompt, negative_prompt, guidance)
    latents = encode_latents(image, seed, num_frames, height, width)
    clean = denoise(text, encode_image(image), latents, steps, guidance)
    return decode(clean, frames_per_second)


@workflow
def image_to_frames(
    prompt: str,
    image: bytes,
    negative_prompt: str = "",
    steps: int | None = None,
    guidance: float | None = None,
    seed: int = 0,
    num_frames: int | None = None,
    height: int | None = None,
    width: int | None = None,
) -> Tensor:
    """The same clip as exact frames, uint8 [frames, height, width, 3]."""
    text = encode_text(prompt, negative_prompt, guidance)
    latents = encode_latents(image, seed, num_frames, height, width)
    clean = denoise(text, encode_image(image), latents, steps, guidance)
    return decode_frames(clean)
