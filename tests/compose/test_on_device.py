"""Tensors of torch over memory that is somebody else's, and as the bytes that they lie in.

No device takes part: what torch does with a span on a GPU it does here with an array in the host's memory.
"""

from typing import Any

import numpy as np
import pytest
import torch

from onepiece import _torch
from onepiece.codec import WireTensor, materialise
from onepiece.types import ARRAY, TENSOR, TORCH
from transports import DeviceSpan
from transports.testing import FakeDevice


@pytest.mark.parametrize(
    ("dtype", "shape"), [("bfloat16", (4, 6)), ("float32", (3, 1, 4)), ("bool", (48,)), ("complex64", (6,))]
)
def test_a_tensor_over_a_span_is_no_copy(dtype: str, shape: tuple[int, ...]) -> None:
    """It has the dtype and shape that were sent, and the span's own bytes."""
    span: Any = np.arange(48, dtype=np.uint8)
    tensor = _torch.over_span(dtype, shape, span, "cpu")
    assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", shape)
    assert tensor.data_ptr() == span.ctypes.data
    assert bytes(_torch.buffer(tensor)) == span.tobytes()


def test_a_scalar_over_a_span() -> None:
    """A tensor without dimensions is one element."""
    span: Any = np.array([0, 0, 128, 63], np.uint8)
    assert _torch.over_span("float32", (), span, "cpu").item() == 1.0


def test_elements_lie_where_the_tensor_lies() -> None:
    """Contiguous ones are the tensor's own memory; others are copied, without what is between them."""
    tensor = torch.arange(12, dtype=torch.int16).reshape(3, 4)
    assert _torch.elements(tensor).data_ptr() == tensor.data_ptr()
    assert _torch.elements(tensor[1:]).data_ptr() == tensor[1:].data_ptr()
    assert _torch.elements(tensor.t()).numel() == 24
    assert bytes(_torch.buffer(tensor.t())) == tensor.t().contiguous().numpy().tobytes()
    assert not _torch.is_on_gpu(tensor)


def _on_device(data: bytes) -> DeviceSpan:
    device = FakeDevice()
    memory = device.allocate(len(data))
    memory.put(0, (data,))
    return memory.span(0, len(data))


def test_what_is_wanted_elsewhere_is_copied() -> None:
    """An array, and a tensor on another device, are made of a copy in the host's memory."""
    data = np.arange(6, dtype=np.float32)
    value = WireTensor("float32", (2, 3), _on_device(data.tobytes()))
    array = materialise(value, ARRAY, "cpu")
    assert isinstance(array, np.ndarray)
    assert array.tolist() == data.reshape(2, 3).tolist()
    for spec in (TORCH, TENSOR):
        tensor = materialise(value, spec, "cpu")
        assert isinstance(tensor, torch.Tensor)
        assert tensor.tolist() == data.reshape(2, 3).tolist()
