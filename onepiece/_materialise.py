"""Out of a received message: one copy, after which nothing refers to the message any more.

What lies in a device's memory and is wanted there as a tensor is not copied: that tensor is the message's own
bytes, and keeps them. So it is with tensors on a processor where the message has memory of its own
(``is_own``), which stays for as long as it is referred to.
"""

from typing import Any, Final

from attrs import frozen

from onepiece import _torch
from onepiece._annotations import build_record, record_class
from onepiece._values import check_value
from onepiece._wire import Wire, WireBytes, WireRecord, WireTensor, WireText, in_host
from onepiece.errors import CodecError
from onepiece.tensor import numpy_dtype, numpy_from_buffer
from onepiece.types import ANY, Kind, TypeSpec

AS_SENT: Final = TypeSpec(Kind.ANY, name="as sent")
"""Any type, where a record whose class is not known here is kept for somebody who knows it."""


def select(value: Any, path: tuple[int | str, ...]) -> Any:
    """The item of a value that ``path`` leads to, whether it was materialised or still lies on the wire.

    Raises:
        CodecError: There is no such item.
    """
    for step in path:
        try:
            if isinstance(value, WireRecord):
                value = value.fields[step] if isinstance(step, str) else list(value.fields.values())[step]
            else:
                value = getattr(value, step) if isinstance(step, str) else value[step]
        except (AttributeError, LookupError, TypeError) as error:
            raise CodecError(f"a value has no item {step!r} of the path {list(path)}") from error
    return value


def materialise(value: Wire, spec: TypeSpec, device: str = "cpu", *, is_own: bool = False) -> Any:
    """Copy a received value out of its message, as the type that a signature wants.

    Args:
        value: One of ``Unpacked.values``.
        spec: ``onepiece.Tensor`` becomes a ``torch.Tensor`` if this process has imported torch and
            torch has the dtype, else a ``numpy.ndarray``; ``torch.Tensor`` and ``numpy.ndarray``
            become what they say.
        device: Where torch tensors are made: ``cpu``, ``cuda:0``.
        is_own: The message's memory is nobody else's, and stays while it is referred to.

    Returns:
        A value that no longer refers to the message, but for the tensors on ``device`` of a message there,
        or on a processor if ``is_own``.

    Raises:
        CodecError: The value is not of this type, or its dtype does not exist here.
        DeviceError: (of transports) The device of such a message refuses a copy.
    """
    why = check_value(spec, value)
    if why is not None:
        raise CodecError(why)
    return _copied(value, spec, _Place(device, is_own))


@frozen
class _Place:
    """Where a value is wanted."""

    device: str
    is_own: bool


def _copied(value: Wire, spec: TypeSpec, place: _Place) -> Any:
    if spec.kind is Kind.UNION:
        spec = next(item for item in spec.items if check_value(item, value) is None)
    if isinstance(value, WireTensor):
        return _tensor(value, spec, place)
    if isinstance(value, WireBytes):
        return bytes(in_host(value.buffer))
    if isinstance(value, WireText):
        try:
            return str(in_host(value.buffer), "utf-8")
        except UnicodeDecodeError as error:
            raise CodecError(f"a text that is no UTF-8: {error}") from error
    if isinstance(value, WireRecord):
        return _record(value, spec, place)
    if isinstance(value, dict):
        return {key: _copied(item, _inner(spec), place) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item, _inner(spec), place) for item in value]
    if isinstance(value, tuple):
        types = spec.items if spec.kind is Kind.TUPLE else (_inner(spec),) * len(value)
        return tuple(_copied(item, inner, place) for item, inner in zip(value, types, strict=True))
    return float(value) if spec.kind is Kind.FLOAT else value


def _inner(spec: TypeSpec) -> TypeSpec:
    return spec.items[0] if spec.items else _untyped(spec)


def _untyped(spec: TypeSpec) -> TypeSpec:
    return AS_SENT if spec is AS_SENT else ANY


def _record(value: WireRecord, spec: TypeSpec, place: _Place) -> Any:
    """The object; the plain map of its fields where no annotation of this process names its class."""
    types = dict(zip(spec.names, spec.items, strict=True))
    fields = {
        name: _copied(item, types.get(name, _untyped(spec)), place) for name, item in value.fields.items()
    }
    cls = record_class(value.name)
    if cls is None and spec is AS_SENT:
        return value
    if cls is None:
        if spec.kind is Kind.RECORD:
            raise CodecError(f"the class {value.name} is not known here: import the workflow's module")
        return fields
    try:
        return build_record(cls, fields)
    except (TypeError, ValueError) as error:
        raise CodecError(f"a {value.name} cannot be made of what arrived: {error}") from error


def _tensor(value: WireTensor, spec: TypeSpec, place: _Place) -> Any:
    wants_torch = spec.kind is Kind.TORCH or (spec.kind is not Kind.ARRAY and _torch.is_imported())
    wants_torch = wants_torch and _torch.has_dtype(value.dtype)
    if wants_torch and not isinstance(value.buffer, memoryview) and value.buffer.device.name == place.device:
        return _torch.over_span(value.dtype, value.shape, value.buffer, place.device)
    buffer = in_host(value.buffer)
    if wants_torch:
        return _torch.from_buffer(value.dtype, value.shape, buffer, place.device, is_own=place.is_own)
    if spec.kind is not Kind.TORCH:
        return numpy_from_buffer(value.dtype, value.shape, buffer, is_own=place.is_own)
    dtype = numpy_dtype(value.dtype)
    native = dtype.newbyteorder("=")
    if not _torch.has_dtype(native.name):
        raise CodecError(f"torch has no dtype {value.dtype}; annotate the parameter as numpy.ndarray")
    array = numpy_from_buffer(value.dtype, value.shape, buffer, is_own=place.is_own)
    return _torch.from_array(array.astype(native, copy=False), place.device)
