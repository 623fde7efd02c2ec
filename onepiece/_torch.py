"""The owner of torch: nothing else in ``onepiece`` imports it, and this only on first use.

A tensor's buffer is its own memory, unless it lies on another device or its elements do not lie one
behind the other in C order; then exactly its elements are copied, never the storage it is a view of.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from onepiece.errors import CodecError, ConfigError
from onepiece.tensor import ITEM_BYTES

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from transports.device_memory import DeviceSpan

    Group: TypeAlias = ProcessGroup | None

_NAME_PREFIX: Final = "torch."


def is_imported() -> bool:
    """Whether this process has torch at hand; never imports it."""
    return hasattr(sys.modules.get("torch"), "frombuffer")  # absent while another thread imports it


def is_tensor(value: object) -> bool:
    """Whether the value is a ``torch.Tensor``; a process without torch has none."""
    module = sys.modules.get("torch")
    kind = getattr(module, "Tensor", None)
    return kind is not None and isinstance(value, kind)


def _module() -> ModuleType:
    try:
        import torch
    except ImportError as error:
        raise CodecError(
            "a torch.Tensor is wanted here, and torch is not installed;"
            " install the extra 'diffusion' (pip install -e '.[diffusion]')"
        ) from error
    return torch


def has_dtype(name: str) -> bool:
    """Whether the torch of this process knows the dtype with this wire name."""
    return name in ITEM_BYTES and hasattr(_module(), name)


def wire_name(tensor: "torch.Tensor") -> str:
    """The wire name of the tensor's dtype; raises ``CodecError`` for tensors that cannot travel."""
    name = str(tensor.dtype).removeprefix(_NAME_PREFIX)
    if name not in ITEM_BYTES:
        raise CodecError(f"torch dtype {tensor.dtype} has no form on the wire; convert the tensor first")
    if str(tensor.layout) != "torch.strided":
        raise CodecError(f"a tensor of layout {tensor.layout} has no form on the wire; send a dense one")
    if tensor.is_nested:
        raise CodecError("a nested tensor has no form on the wire; send the list of its parts (unbind)")
    if tensor.device.type == "meta":
        raise CodecError("a tensor on the meta device has no elements to send")
    return name


def is_on_gpu(tensor: "torch.Tensor") -> bool:
    """Whether there is something of the tensor in a CUDA device's memory."""
    return tensor.device.type == "cuda" and tensor.numel() > 0


def buffer(tensor: "torch.Tensor") -> memoryview:
    """The tensor's elements in C order, in host memory."""
    if tensor.numel() == 0:
        return memoryview(b"")
    array: np.ndarray[Any, Any] = elements(tensor).cpu().numpy()
    return array.data


def elements(tensor: "torch.Tensor") -> "torch.Tensor":
    """The bytes of the tensor's elements in C order, on its device: its own memory if they lie so there."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    # Contiguous first: of an expanded tensor on another device only its elements cross over. Then the
    # strides anew, as torch calls a tensor of one element contiguous whatever its stride.
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(_module().uint8)


_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}


def backend_for(device: str) -> str:
    """What ranks on this kind of device talk through: gloo for ``cpu``, nccl for ``cuda:0``.

    Raises ``ConfigError`` for any other kind.
    """
    kind = device.partition(":")[0]
    backend = _BACKENDS.get(kind)
    if backend is None:
        raise ConfigError(f"ctx.group is there on {' and '.join(_BACKENDS)}; {device!r} is neither")
    return backend


def join_group(device: str, descriptor: int, rank: int, world_size: int) -> Any:
    """Make the default process group, with gloo on CPUs and nccl on GPUs; blocks until all ranks do.

    Args:
        device: Of this rank: ``cpu``, ``cuda:0``.
        descriptor: A file without a name, the same one in all ranks, empty before the first of them.
        rank: Of this process.
        world_size: How many processes there are.

    Raises:
        ConfigError: torch is not installed, or has no support for this.
    """
    try:
        import torch
        from torch import distributed
    except ImportError as error:
        raise ConfigError(
            "a stage on several devices asks for ctx.group, and torch is not installed;"
            " install the extra 'diffusion' (pip install -e '.[diffusion]')"
        ) from error
    backend = backend_for(device)
    if not distributed.is_available() or not distributed.is_backend_available(backend):
        wanted = "built for CUDA" if backend == "nccl" else "that has torch.distributed"
        raise ConfigError(
            f"this torch ({torch.__version__}) has no {backend}, which ctx.group needs on {device}: "
            f"install one {wanted}, or give the stage one device"
        )
    where = None
    if backend == "nccl":
        where = torch.device(device)
        torch.cuda.set_device(where)
    # By the descriptor's own path: nothing of the meeting place has a name, a port or an owner to clean up.
    path = f"/proc/self/fd/{descriptor}"
    store = distributed.FileStore(path, world_size)  # type: ignore[attr-defined]  # documented, not listed
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=where)
    return distributed.group.WORLD


def leave_group() -> None:
    """Take down what ``join_group`` made; the other ranks should do so at the same time."""
    from torch import distributed

    distributed.destroy_process_group()


def cuda_memory_bytes(index: int) -> int:
    """All memory of a CUDA device; needs torch."""
    return int(_module().cuda.get_device_properties(index).total_memory)


def from_buffer(
    name: str, shape: tuple[int, ...], view: memoryview, device: str, *, is_own: bool = False
) -> Any:
    """A tensor on ``device`` with the buffer's elements; the caller has checked the sizes.

    A new one, or, if the buffer ``is_own`` and lies there, one over it, where it may be written to.
    """
    torch = _module()
    dtype = getattr(torch, name)
    source = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    is_taken_as_it_is = device != "cpu" or (is_own and not source.ctypes.data % dtype.itemsize)
    # Without elements there is nothing to lie over, and torch cannot view what has numpy's stride of 0.
    if is_taken_as_it_is and view.nbytes and source.flags.writeable:
        # Blocks until the copy has taken place, so the view may be given back behind it.
        flat = torch.from_numpy(source).to(device)
    else:
        flat = torch.empty(view.nbytes, dtype=torch.uint8)
        np.copyto(flat.numpy(), source)
        flat = flat.to(device)
    return flat.view(dtype).view(shape)


def over_span(name: str, shape: tuple[int, ...], span: "DeviceSpan", device: str) -> Any:
    """A tensor on ``device`` whose memory is the span, which lies there; nothing is copied."""
    torch = _module()
    return torch.as_tensor(span, device=device).view(getattr(torch, name)).view(shape)


def from_array(array: "np.ndarray[Any, Any]", device: str) -> Any:
    """A tensor on ``device`` over an array that the caller owns alone."""
    return _module().from_numpy(array).to(device)


def cuda_use(index: int) -> tuple[int, int]:
    """Bytes that tensors of this process take of a CUDA device: now, and at most since ``cuda_forget``.

    A process that has not imported torch has none.
    """
    if not is_imported():
        return 0, 0
    cuda = _module().cuda
    return int(cuda.memory_allocated(index)), int(cuda.max_memory_allocated(index))


def cuda_forget(index: int) -> None:
    """Begin anew to look for the most that is used of a CUDA device."""
    if is_imported() and _module().cuda.is_initialized():
        _module().cuda.reset_peak_memory_stats(index)


def cuda_name(index: int) -> str:
    """What the maker calls a CUDA device; "" in a process that has not imported torch."""
    return str(_module().cuda.get_device_name(index)) if is_imported() else ""
