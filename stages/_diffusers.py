"""Owner of diffusers, transformers and the hub: Wan image-to-video, cut where its stages are.

Each class below loads the components of one stage and nothing else, and computes what
``WanImageToVideoPipeline.__call__`` computes at that place, to the last bit. Where the pipeline has a
method for it (``encode_prompt``, ``encode_image``, ``prepare_latents``), that method is called, on a
pipeline object that holds only these components; the loop and the decoding, which it has inline, are
written out here in the same order of operations.

Three things decide the last bits besides the arithmetic, and are held fixed:

- the alignment of the weights: files are mapped into memory at any offset, and CPU kernels round
  differently on unaligned ones, so that weights are copied to fresh memory once (``_settle``);
- the number of threads (``limit_threads``);
- the length to which prompts are padded, which belongs to the model (``WanModel``).

Several stages may live in one process, each on threads of its own, and loading is not private to a
thread: while it builds a network, ``from_pretrained`` changes torch's default type and the way modules
register their weights, for the whole process. So loading excludes loading and computing (``_PROCESS``);
computing lets go of it between two denoising steps.

torch, diffusers and transformers are imported on first use: this module is read by processes that only
want the workflow's graph.
"""

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np
from attrs import define

from onepiece import ConfigError, InvalidInput
from stages._shared_lock import SharedLock
from stages._video import Frames
from stages._wan import WanModel

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor

THREADS_VARIABLE: Final = "ONEPIECE_TORCH_THREADS"
_CORES_FOR_A_SECOND_THREAD: Final = 16
_PROCESS: Final = SharedLock()
"""Shared by those that compute, exclusive for those that load."""

_IMPORTING: Final = threading.Lock()
"""Lazy packages are not made for two threads that import different parts of them at once."""

_SCHEDULERS: Final = ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")


def preload() -> None:
    """Import everything any stage needs, e.g. in a process that workers are forked from."""
    libraries()


def choose_threads(cores: int, environ: Mapping[str, str]) -> int:
    """How many threads torch should use in one worker.

    One, unless the machine is large: several workers share it, and OpenMP's threads spin while they
    wait for each other, which on two busy cores costs 10 to 20 times the work.

    Raises:
        ConfigError: ``ONEPIECE_TORCH_THREADS`` is no whole number of at least 1.
    """
    for variable in (THREADS_VARIABLE, "OMP_NUM_THREADS"):
        text = environ.get(variable)
        if text:
            if not text.isdecimal() or int(text) < 1:
                raise ConfigError(f"{variable}={text!r} must be a whole number of at least 1")
            return int(text)
    return max(1, cores // _CORES_FOR_A_SECOND_THREAD)


def limit_threads() -> None:
    """Set torch's threads for this process. Every stage does so before it loads."""
    torch = libraries().torch
    chosen = choose_threads(len(os.sched_getaffinity(0)), os.environ)
    if torch.get_num_threads() != chosen:
        torch.set_num_threads(chosen)


@define
class TextEncoder:
    """Prompt to embeddings: tokenizer and text encoder."""

    _model: WanModel
    _device: "torch.device"
    _pipeline: Any

    @classmethod
    def load(cls, model: WanModel, device: str) -> Self:
        """Load the two components. Blocks."""
        loader = _Loader.start(model, device)
        tokenizer = loader.plain(libraries().tokenizer, "tokenizer")
        encoder = loader.network(libraries().text_encoder, "text_encoder", model.dtype)
        return cls(model, loader.device, _pipeline_of(tokenizer=tokenizer, text_encoder=encoder))

    def encode(self, prompt: str, negative_prompt: str, *, guided: bool) -> "tuple[Tensor, Tensor | None]":
        """Embeddings of the prompt and, if guided, of the negative prompt: [1, tokens, width].

        Raises:
            InvalidInput: A prompt has more tokens than the model reads.
        """
        self._check_length("prompt", prompt)
        if guided:
            self._check_length("negative_prompt", negative_prompt)
        with _computing():
            wanted, unwanted = self._pipeline.encode_prompt(
                prompt=prompt,
                negative_prompt=negative_prompt,
                do_classifier_free_guidance=guided,
                num_videos_per_prompt=1,
                max_sequence_length=self._model.max_sequence_length,
                device=self._device,
            )
        return wanted, unwanted

    def _check_length(self, field: str, text: str) -> None:
        self._model.check_prompt(field, text)
        clean = libraries().clean_prompt(text)
        tokens = self._pipeline.tokenizer(clean, padding=False, truncation=False, verbose=False)["input_ids"]
        bound = self._model.max_sequence_length
        if len(tokens) > bound:
            raise InvalidInput(
                f"{field} has {len(tokens)} tokens; this model reads {bound}. Shorten it.", field=field
            )


@define
class ImageEncoder:
    """First frame to CLIP's view of it: image processor and image encoder."""

    _dtype: "torch.dtype"
    _device: "torch.device"
    _pipeline: Any

    @classmethod
    def load(cls, model: WanModel, device: str) -> Self:
        """Load the two components. Blocks."""
        loader = _Loader.start(model, device)
        processor = loader.plain(libraries().image_processor, "image_processor")
        encoder = loader.network(libraries().image_encoder, "image_encoder", "float32")
        dtype = getattr(libraries().torch, model.dtype)
        return cls(dtype, loader.device, _pipeline_of(image_processor=processor, image_encoder=encoder))

    def encode(self, image: "Image") -> "Tensor":
        """[1, patches + 1, width], in the transformer's type."""
        with _computing():
            embeddings: Tensor = self._pipeline.encode_image(image, self._device)
            return embeddings.to(self._dtype)


@define
class _Autoencoder:
    """What both of the VAE's halves are loaded from."""

    _device: "torch.device"
    _pipeline: Any

    @classmethod
    def load(cls, model: WanModel, device: str) -> Self:
        """Load the VAE. Blocks."""
        loader = _Loader.start(model, device)
        vae = loader.network(libraries().vae, "vae", "float32")
        return cls(loader.device, _pipeline_of(vae=vae))


@define
class LatentEncoder(_Autoencoder):
    """First frame to the latents that denoising starts from: the VAE's encoder."""

    def encode(
        self, image: "Image", *, height: int, width: int, num_frames: int, seed: int
    ) -> "tuple[Tensor, Tensor]":
        """Noise [1, 16, f, h, w] and condition [1, 20, f, h, w], both float32.

        The noise is drawn on the CPU, so that a seed means the same on every device.
        """
        torch = libraries().torch
        with _computing():
            pixels = self._pipeline.video_processor.preprocess(image, height=height, width=width)
            noise, condition = self._pipeline.prepare_latents(
                pixels.to(self._device, dtype=torch.float32),
                1,
                self._pipeline.vae.config.z_dim,
                height,
                width,
                num_frames,
                torch.float32,
                self._device,
                torch.Generator("cpu").manual_seed(seed),
                None,
                None,
            )
        return noise, condition


@define
class Denoiser:
    """Noise to latents of a video, step by step: transformer and scheduler."""

    _device: "torch.device"
    _transformer: Any
    _scheduler_class: Any
    _scheduler_config: Mapping[str, Any]

    @classmethod
    def load(cls, model: WanModel, device: str) -> Self:
        """Load the transformer and the scheduler's configuration. Blocks."""
        loader = _Loader.start(model, device)
        transformer = loader.network(libraries().transformer, "transformer", model.dtype)
        config = loader.scheduler_config()
        name = config["_class_name"]
        if name not in _SCHEDULERS:
            raise ConfigError(
                f"{model.source}: scheduler {name} is none of {', '.join(_SCHEDULERS)}, "
                "with which this stage is tested"
            )
        return cls(loader.device, transformer, libraries().schedulers[name], config)

    def denoise(
        self,
        noise: "Tensor",
        condition: "Tensor",
        prompt: "Tensor",
        negative_prompt: "Tensor | None",
        image: "Tensor",
        *,
        steps: int,
        guidance: float,
        on_step: Callable[[int], None],
    ) -> "Tensor":
        """The denoised latents, float32.

        Args:
            noise: Where to start.
            condition: Mask and first frame, joined to the input of each step.
            prompt: The prompt's embeddings.
            negative_prompt: The negative prompt's; needed only if ``guidance`` is above 1.
            image: The image's embeddings.
            steps: How many.
            guidance: The guidance scale.
            on_step: Called with 0 before the first step and with n after the n-th; may raise to stop.
        """
        torch = libraries().torch
        # The scheduler remembers earlier steps, so each request has one of its own.
        with _computing():
            scheduler = self._scheduler_class.from_config(self._scheduler_config)
            scheduler.set_timesteps(steps, device=self._device)
        latents, condition = noise.to(self._device), condition.to(self._device)
        wanted, unwanted, seen = (self._as_input(x) for x in (prompt, negative_prompt, image))
        on_step(0)
        for index, moment in enumerate(scheduler.timesteps):
            with _computing():
                joined = torch.cat([latents, condition], dim=1).to(self._transformer.dtype)
                velocity = self._predict("cond", joined, moment, wanted, seen)
                if unwanted is not None and guidance > 1:
                    away = self._predict("uncond", joined, moment, unwanted, seen)
                    velocity = away + guidance * (velocity - away)
                latents = scheduler.step(velocity, moment, latents, return_dict=False)[0]
            on_step(index + 1)
        return latents

    def _as_input(self, tensor: "Tensor | None") -> Any:
        return None if tensor is None else tensor.to(self._device, self._transformer.dtype)

    def _predict(self, branch: str, latents: Any, moment: Any, text: Any, image: Any) -> Any:
        with self._transformer.cache_context(branch):
            return self._transformer(
                hidden_states=latents,
                timestep=moment.expand(latents.shape[0]),
                encoder_hidden_states=text,
                encoder_hidden_states_image=image,
                attention_kwargs=None,
                return_dict=False,
            )[0]


@define
class Decoder(_Autoencoder):
    """Latents to frames: the VAE's decoder."""

    def decode(self, latents: "Tensor") -> Frames:
        """Frames of the first video in the batch."""
        torch = libraries().torch
        vae = self._pipeline.vae
        shape = (1, vae.config.z_dim, 1, 1, 1)
        with _computing():
            latents = latents.to(self._device, vae.dtype)
            mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents.device, latents.dtype)
            deviation = torch.tensor(vae.config.latents_std).view(shape).to(latents.device, latents.dtype)
            # Divided by the inverse, as the pipeline does: the product rounds differently.
            video = vae.decode(latents / (1.0 / deviation) + mean, return_dict=False)[0]
            shown = self._pipeline.video_processor.postprocess_video(video, output_type="np")[0]
        frames: Frames = (shown * 255).round().astype(np.uint8)
        return frames


class Libraries(NamedTuple):
    """What is used of the packages that this module owns. They ship no usable types: all is ``Any``."""

    torch: Any
    diffusers: Any
    transformers: Any
    pipeline: Any
    vae: Any
    transformer: Any
    schedulers: Mapping[str, Any]
    tokenizer: Any
    text_encoder: Any
    image_encoder: Any
    image_processor: Any
    clean_prompt: Callable[[str], str]
    download: Callable[..., str]


@contextlib.contextmanager
def _computing() -> Iterator[None]:
    """No gradients are kept, and nothing loads meanwhile."""
    with _PROCESS.shared(), libraries().torch.no_grad():
        yield


def libraries() -> Libraries:
    """The libraries, imported by the first call.

    Raises:
        ConfigError: One is not installed; the extra to install is named.
    """
    with _IMPORTING:
        return _import_libraries()


@functools.cache
def _import_libraries() -> Libraries:
    try:
        torch, transformers, diffusers = (
            importlib.import_module(name) for name in ("torch", "transformers", "diffusers")
        )
        # The pipeline's module asks for an image processor that needs torchvision, and warns that it
        # gets another. The other is the one that is wanted.
        logging = importlib.import_module("transformers.utils.logging")
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        pipeline = importlib.import_module("diffusers.pipelines.wan.pipeline_wan_i2v")
        logging.set_verbosity(verbosity)
        logging.disable_progress_bar()
        return Libraries(
            torch=torch,
            diffusers=diffusers,
            transformers=transformers,
            pipeline=pipeline.WanImageToVideoPipeline,
            vae=diffusers.AutoencoderKLWan,
            transformer=diffusers.WanTransformer3DModel,
            schedulers={name: getattr(diffusers, name) for name in _SCHEDULERS},
            tokenizer=transformers.AutoTokenizer,
            text_encoder=transformers.UMT5EncoderModel,
            image_encoder=transformers.CLIPVisionModel,
            image_processor=_image_processor_class(transformers),
            clean_prompt=pipeline.prompt_clean,
            download=importlib.import_module("huggingface_hub").snapshot_download,
        )
    except ImportError as error:
        raise ConfigError(f"Wan models need {error.name or error}; pip install -e '.[diffusion]'") from error


def _image_processor_class(transformers: Any) -> Any:
    """CLIP's image processor on Pillow: the other one needs torchvision and resizes a little differently."""
    try:
        return transformers.CLIPImageProcessorPil
    except AttributeError:
        return transformers.CLIPImageProcessor  # before transformers 5 it is the one on Pillow


@define
class _Loader:
    """Loads single components of one model onto one device."""

    model: WanModel
    device: "torch.device"

    @classmethod
    def start(cls, model: WanModel, device: str) -> Self:
        limit_threads()
        # "cpu:1" is a device of the placement; to torch there is one CPU.
        return cls(model, libraries().torch.device("cpu" if device.startswith("cpu") else device))

    def plain(self, kind: Any, component: str) -> Any:
        """Something without weights."""
        return self._load(kind, component)

    def network(self, kind: Any, component: str, dtype: str) -> Any:
        """A network, ready to compute on the device."""
        # Without a type some libraries keep the file's and others float32.
        network = self._load(kind, component, **{_dtype_keyword(kind): getattr(libraries().torch, dtype)})
        return _settle(network, self.device)

    def scheduler_config(self) -> Mapping[str, Any]:
        config: Mapping[str, Any] = self._load(
            libraries().schedulers[_SCHEDULERS[0]], "scheduler", method="load_config"
        )
        return config

    def _load(self, kind: Any, component: str, *, method: str = "from_pretrained", **options: Any) -> Any:
        try:
            folder = self._folder_with(component)
            with _PROCESS.exclusive():
                return getattr(kind, method)(folder, subfolder=component, local_files_only=True, **options)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot load {component} of model {self.model.source!r}: {error}") from error

    def _folder_with(self, component: str) -> str:
        """The model's folder; of a model on the hub, a copy that holds this component at least."""
        if self.model.is_local:
            return self.model.source
        patterns = [f"{component}/*.{suffix}" for suffix in ("json", "safetensors", "model", "txt")]
        return str(libraries().download(self.model.source, allow_patterns=patterns))


def _dtype_keyword(kind: Any) -> str:
    return "torch_dtype" if kind.__module__.startswith("diffusers") else "dtype"


def _settle(network: Any, device: "torch.device") -> Any:
    """Move weights out of the mapped file, to the device or to aligned memory; no gradients."""
    network.requires_grad_(requires_grad=False)
    network.eval()
    if device.type != "cpu":
        return network.to(device)
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data = tensor.data.clone()
    return network


def _pipeline_of(**components: Any) -> Any:
    """A pipeline that holds only these components; what its methods for them need, and no more."""
    missing: dict[str, Any] = dict.fromkeys(("tokenizer", "text_encoder", "vae", "scheduler"))
    return libraries().pipeline(**{**missing, **components})
