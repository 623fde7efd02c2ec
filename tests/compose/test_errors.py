"""Errors survive the wire, as what they were."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from attrs import frozen

import onepiece
from onepiece.codec import decode_control, encode_control, register
from onepiece.errors import OnePieceError, _all_kinds

KINDS = sorted(
    (name, kind)
    for name, kind in _all_kinds(OnePieceError).items()
    if kind.__module__.partition(".")[0] == "onepiece"  # not those of packages that are tested beside it
)


@register
@frozen
class ErrorCarrier:
    """A message that carries an error."""

    error: Mapping[str, Any]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_every_error_survives_the_wire(name: str, kind: type[OnePieceError]) -> None:
    """Class, message, fields and retryable are the same after CBOR and after JSON; no pickle is used."""
    error = kind("it happened; do this", stage="denoise", node="n-1", step=3)
    carried = decode_control(encode_control(ErrorCarrier(error.to_wire())))
    assert isinstance(carried, ErrorCarrier)
    for wire in (carried.error, json.loads(json.dumps(error.to_wire()))):
        received = OnePieceError.from_wire(wire)
        assert type(received) is kind
        assert type(received).__name__ == name
        assert str(received) == "it happened; do this"
        assert received.fields == {"stage": "denoise", "node": "n-1", "step": 3}
        assert wire["retryable"] is kind.retryable


def test_what_has_no_form_in_utf8_is_told_all_the_same() -> None:
    """Surrogates, of broken texts and file names, are written out wherever in the error they stand."""
    error = onepiece.StageFailed("it raised \udc80", traceback="\udc80", names=["a\ud800"], by={"\udfff": 1})
    carried = decode_control(encode_control(ErrorCarrier(error.to_wire())))
    assert isinstance(carried, ErrorCarrier)
    json.dumps(error.to_wire(), ensure_ascii=False).encode()
    received = OnePieceError.from_wire(carried.error)
    assert received.message == r"it raised \udc80"
    assert received.fields == {"traceback": r"\udc80", "names": [r"a\ud800"], "by": {r"\udfff": 1}}


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_every_error_is_public_and_explained(name: str, kind: type[OnePieceError]) -> None:
    """Each is a name of ``onepiece``, has a docstring of its own and an HTTP status that says "not here"."""
    assert getattr(onepiece, name) is kind
    assert name in onepiece.__all__
    assert kind.__doc__
    assert kind.__doc__ != OnePieceError.__doc__ or kind is OnePieceError
    assert 300 <= kind.http_status < 600


def test_an_unknown_error_keeps_its_name() -> None:
    """A newer peer's error becomes the root class, with the name in its message."""
    received = OnePieceError.from_wire({"error": "DiskOnFire", "message": "hot", "fields": {"node": "n"}})
    assert type(received) is OnePieceError
    assert str(received) == "DiskOnFire: hot"
    assert received.fields == {"node": "n"}


@pytest.mark.parametrize(
    "wire",
    [
        {},
        {"error": None, "message": None, "fields": None},
        {"error": "StageFailed", "message": "m", "fields": [1, 2]},
        {"error": "StageFailed", "message": "m", "fields": {1: 2}},
        {"error": "StageFailed", "message": "m", "fields": {"message": "x", "self": "y"}},
        {"error": "type", "message": 5},
    ],
)
def test_a_malformed_error_is_still_an_error(wire: dict[str, Any]) -> None:
    """Whatever a peer sends in place of an error, it can be raised, and fields cannot shadow arguments."""
    with pytest.raises(OnePieceError):
        raise OnePieceError.from_wire(wire)
