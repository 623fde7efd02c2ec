"""``--input name=text`` and ``--input name=@file``, read as the workflow's signature says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from onepiece.client.api import InputInfo, WorkflowInfo, value_from_text
from onepiece.errors import ConfigError, InvalidInput
from onepiece.graph import Kind

FILE_BYTES_MAX: Final = 1 << 30
_TENSOR_KINDS: Final = frozenset({Kind.TENSOR.value, Kind.TORCH.value, Kind.ARRAY.value})

HELP: Final = (
    "an input: name=text, or name=@file for a file's contents (name=@@text for a text that begins with @). "
    "Texts are read as the workflow's signature says: a str as it is, numbers, true, false and null, JSON "
    "for lists, maps and records; tensors come from .npy files"
)


def read_inputs(workflow: WorkflowInfo, given: Sequence[str]) -> dict[str, Any]:
    """The inputs' values.

    Raises:
        ConfigError: An argument is not ``name=...``, or a file cannot be read.
        InvalidInput: A name is unknown or there twice, or a text does not fit its type.
    """
    known = {info.name: info for info in workflow.inputs}
    inputs: dict[str, Any] = {}
    for argument in given:
        name, equals, text = argument.partition("=")
        if not equals or not name:
            raise ConfigError(f"--input {argument[:60]!r} is not of the form name=text or name=@file")
        if name in inputs:
            raise InvalidInput(f"the input {name!r} is there twice", field=name)
        if name not in known:
            described = ", ".join(f"{info.name}: {info.type}" for info in workflow.inputs) or "none"
            raise InvalidInput(
                f"workflow {workflow.name!r} has no input {name!r}; its inputs are: {described}", field=name
            )
        inputs[name] = _read(known[name], text)
    return inputs


def _read(info: InputInfo, text: str) -> Any:
    if text.startswith("@@"):
        return value_from_text(info, text[1:])
    if not text.startswith("@"):
        return value_from_text(info, text)
    path = Path(text[1:])
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise InvalidInput(
                f"input {info.name!r}: {path} is larger than {FILE_BYTES_MAX} bytes", field=info.name
            )
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"input {info.name!r}: {path} cannot be read: {error.strerror}") from error
    return _from_file(info, path, data)


def _from_file(info: InputInfo, path: Path, data: bytes) -> Any:
    kinds = set(info.kinds)
    if kinds & _TENSOR_KINDS:
        return _from_npy(info, path)
    if kinds & {Kind.BYTES.value, Kind.ANY.value}:
        return data
    try:
        return value_from_text(info, data.decode())
    except UnicodeDecodeError as error:
        raise InvalidInput(f"input {info.name!r}: {path} is no UTF-8: {error}", field=info.name) from error


def _from_npy(info: InputInfo, path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InvalidInput(
            f"input {info.name!r}: {path} is no .npy file: {error}", field=info.name
        ) from error
