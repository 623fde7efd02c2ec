"""The networks: the real Wan classes, made small, and what all steps of the training do with them."""

import json
import math
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from stages._diffusers import libraries
from stages.training.digits import COLOURS, DIGIT_WORDS, MOVES, Frames

PROMPT_TOKENS: Final = 16
FLOW_SHIFT: Final = 3.0
CLIP_SIZE: Final = 32


class Conditioners(NamedTuple):
    """The two encoders that are trained together with the transformer."""

    text: Any
    image: Any


def make_tokenizer() -> Any:
    """One token for each word the prompts know. It needs no training, and so is the same everywhere."""
    words = sorted({word for move in MOVES for word in move.split()})
    vocabulary = ["<pad>", "</s>", "<unk>", "a", *DIGIT_WORDS, *COLOURS, *words]
    ids = {word: index for index, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))  # noqa: S106 - no secret, a token of text
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", ids["</s>"])]
    )
    return libraries().transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106 - as above
        eos_token="</s>",  # noqa: S106 - as above
        unk_token="<unk>",  # noqa: S106 - as above
        model_max_length=PROMPT_TOKENS,
    )


def make_autoencoder() -> Any:
    """8x in space, 4x in time, 16 channels, as Wan2.1; patches of 2 quarter its cost."""
    return libraries().vae(
        base_dim=16,
        z_dim=16,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        patch_size=2,
        in_channels=12,
        out_channels=12,
        scale_factor_spatial=8,
        scale_factor_temporal=4,
    )


def make_transformer() -> Any:
    """Wan2.1's image-to-video layout: noise, mask and first frame in, with image cross-attention."""
    transformer = libraries().transformer(
        patch_size=(1, 2, 2),
        num_attention_heads=5,
        attention_head_dim=32,
        in_channels=36,
        out_channels=16,
        text_dim=64,
        freq_dim=128,
        ffn_dim=448,
        num_layers=5,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=64,
        image_dim=64,
        added_kv_proj_dim=160,
    )
    torch.nn.init.zeros_(transformer.proj_out.weight)
    torch.nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def make_conditioners(vocabulary_size: int) -> Conditioners:
    """A text encoder and an image encoder, both two layers of 64."""
    text = libraries().text_encoder(
        libraries().transformers.UMT5Config(
            vocab_size=vocabulary_size,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    image = libraries().image_encoder(
        libraries().transformers.CLIPVisionConfig(
            hidden_size=64,
            projection_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=CLIP_SIZE,
            intermediate_size=128,
            patch_size=8,
        )
    )
    return Conditioners(text, image)


def make_image_processor() -> Any:
    """CLIP's preprocessing on Pillow."""
    return libraries().image_processor(crop_size=CLIP_SIZE, size=CLIP_SIZE)


def load_autoencoder(work: Path) -> Any:
    """The trained autoencoder, frozen."""
    return (
        libraries()
        .diffusers.AutoencoderKLWan.from_pretrained(work / "vae")
        .eval()
        .requires_grad_(requires_grad=False)
    )


def save_pipeline(transformer: Any, conditioners: Conditioners, tokenizer: Any, work: Path) -> None:
    """Write the whole pipeline as ``WanImageToVideoPipeline`` reads it, in half precision."""
    scheduler = libraries().diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=FLOW_SHIFT,
    )
    libraries().pipeline(
        tokenizer=tokenizer,
        text_encoder=conditioners.text.half(),
        vae=load_autoencoder(work).half(),
        image_encoder=conditioners.image.half(),
        transformer=transformer.half(),
        image_processor=make_image_processor(),
        scheduler=scheduler,
    ).save_pretrained(work / "pipeline")
    _tidy(work / "pipeline")


def _tidy(folder: Path) -> None:
    """Take out where the autoencoder was read from, and let others read the weights."""
    config = folder / "vae" / "config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    settings.pop("_name_or_path", None)
    config.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)


def load_pipeline(folder: Path) -> Any:
    """A whole pipeline, in single precision."""
    pipeline = libraries().pipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _wan_module() -> Any:
    return libraries().diffusers.models.autoencoders.autoencoder_kl_wan


def encode_clips(autoencoder: Any, clips: Tensor) -> Tensor:
    """The mean latents of clips [batch, 3, frames, height, width].

    The same arithmetic as ``AutoencoderKLWan.encode``, in two chunks (the first frame, the rest) instead
    of one for each latent: equal results from fewer and larger operations.
    """
    patches = _wan_module().patchify(clips, autoencoder.config.patch_size)
    autoencoder.clear_cache()
    parts = []
    for first, behind in ((0, 1), (1, patches.shape[2])):
        autoencoder._enc_conv_idx = [0]  # noqa: SLF001 - diffusers has no public way to encode in chunks
        part = autoencoder.encoder(
            patches[:, :, first:behind],
            feat_cache=autoencoder._enc_feat_map,  # noqa: SLF001 - as above
            feat_idx=autoencoder._enc_conv_idx,  # noqa: SLF001 - as above
        )
        parts.append(part)
    moments = autoencoder.quant_conv(torch.cat(parts, 2))
    autoencoder.clear_cache()
    mean: Tensor = moments.chunk(2, 1)[0]
    return mean


def decode_latents(autoencoder: Any, latents: Tensor) -> Tensor:
    """The clips of raw latents; in two chunks, as ``encode_clips``."""
    autoencoder.clear_cache()
    inner = autoencoder.post_quant_conv(latents)
    parts = []
    for first, behind in ((0, 1), (1, latents.shape[2])):
        autoencoder._conv_idx = [0]  # noqa: SLF001 - diffusers has no public way to decode in chunks
        part = autoencoder.decoder(
            inner[:, :, first:behind],
            feat_cache=autoencoder._feat_map,  # noqa: SLF001 - as above
            feat_idx=autoencoder._conv_idx,  # noqa: SLF001 - as above
            **({"first_chunk": True} if first == 0 else {}),
        )
        parts.append(part)
    autoencoder.clear_cache()
    clips: Tensor = _wan_module().unpatchify(torch.cat(parts, 2), autoencoder.config.patch_size)
    return clips


def normalise(autoencoder: Any, latents: Tensor) -> Tensor:
    """Latents as the transformer sees them: zero mean, unit deviation, channel by channel."""
    mean = torch.tensor(autoencoder.config.latents_mean).view(1, -1, 1, 1, 1)
    deviation = torch.tensor(autoencoder.config.latents_std).view(1, -1, 1, 1, 1)
    return (latents - mean) * (1.0 / deviation)


def as_clips(frames: list[Frames]) -> Tensor:
    """Frames of several clips as [batch, 3, frames, height, width], -1 to 1."""
    stacked = torch.stack([torch.from_numpy(clip) for clip in frames])
    return stacked.float().div(127.5).sub(1).permute(0, 4, 1, 2, 3).contiguous()


def signal_to_noise(left: Tensor, right: Tensor) -> float:
    """PSNR in dB of two tensors in -1 to 1."""
    return -10 * math.log10(max(1e-12, float(((left - right) / 2).pow(2).mean())))
