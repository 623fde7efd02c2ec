"""Tensors in a device's memory as bytes to be sent; transports are imported when there is one."""

from typing import TYPE_CHECKING, Any

from onepiece import _torch
from onepiece.errors import CodecError

if TYPE_CHECKING:
    from transports.device_memory import DeviceSpan


def span_of(tensor: Any) -> "DeviceSpan":
    """A torch tensor's elements in C order where they lie, computed by now; blocks until they are.

    The span keeps the tensor, which must not be written to any more. Raises ``CodecError`` if the driver
    refuses.
    """
    from transports.cuda import wait_for_span
    from transports.device_memory import DeviceError

    try:
        return wait_for_span(_torch.elements(tensor))
    except DeviceError as error:
        raise CodecError(f"a tensor on {tensor.device} cannot be sent from there: {error}") from error
