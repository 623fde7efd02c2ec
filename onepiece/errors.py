"""What a user, an operator or a stage can be told; named by what they can do about it.

::

    OnePieceError
      DefinitionError       a stage or workflow is written wrongly; raised at import
        WiringError             an output does not fit the input it is wired to; both schemas are named
      ConfigError           a flag, variable or file holds something unusable
      Rejected              not accepted: try later or elsewhere
        UnknownWorkflow         no such workflow; known ones are listed
        InvalidInput            a field is unknown, missing or of the wrong type
        PayloadTooLarge         the body exceeds a bound
        NotReady                stages of the workflow are not loaded (yet)
        Overloaded              too many requests in flight
      RequestFailed         accepted, and ended without a result
        StageFailed             the stage's own code raised, or returned what its signature denies
        NodeLost                the node that held the work is gone
        DeadlineExceeded        the deadline passed
        RequestCancelled        somebody cancelled it
        StoreFull               the result store's byte budget is used up
        JoinBudgetExceeded      inputs waiting for their siblings exceed the actor's budget
      UnknownRequest        no such UID here
      OwnedElsewhere        another proxy owns the request: ask that one
      UnknownNode           no node of this name is in the set; those that are are listed
      ResultGone            it was there; it has been fetched or its time to live is over
      PlacementError        a stage fits on no device
      LeadershipLost        this manager does not lead any more; nothing was stored
      SchemaMismatch        two nodes hold different versions of a workflow; both schemas are named
      NodeUnreachable       the address does not answer
      CodecError            a value has no form on the wire, or bytes from the wire follow no rule

Every error survives the wire: ``to_wire`` gives its name, message and fields; ``from_wire`` builds
the same class again. An unknown name becomes a plain ``OnePieceError`` that keeps name and message.
A class that is derived elsewhere travels as the one of these that it is derived from: nobody else need
have it, or be able to make one.

``to_wire`` is where any error becomes fit for messages, stores and JSON, whoever raised it: bounded, and
of plain values alone. It never raises.
"""

# ruff: noqa: N818  # named by what the caller can do, not by being an error

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from onepiece._bounded import attribute, kind_name, plain, text_of
from onepiece.limits import ERROR_FIELDS_BYTES_MAX, ERROR_SHOWN_BYTES_MAX

_SHORT_MESSAGE_BYTES: Final = 1000


class OnePieceError(Exception):
    """The root of everything ``onepiece`` raises on purpose.

    Args:
        message: What happened, to which request, stage, node or address, and what to do next.
        **fields: The same, for machines; CBOR-able values only.
    """

    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, /, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (_kind_of(self).__name__, self.message, self.fields)

    def to_wire(self) -> dict[str, Any]:
        """The error as a bounded map of plain values, whose texts can all be written as UTF-8."""
        return _to_wire(self)

    @staticmethod
    def from_wire(wire: Mapping[str, Any]) -> "OnePieceError":
        """Build the error that ``to_wire`` described."""
        fields = wire.get("fields")
        if not isinstance(fields, Mapping):
            fields = {}
        named = {str(name): value for name, value in fields.items()}
        return _rebuild(str(wire.get("error")), str(wire.get("message")), named)


class DefinitionError(OnePieceError):
    """A stage or a workflow is written wrongly; raised where it is defined."""


class WiringError(DefinitionError):
    """An output does not fit the input it is wired to."""


class ConfigError(OnePieceError):
    """A flag, an environment variable or the file holds something unusable; the message names it."""


class Rejected(OnePieceError):
    """The request was not accepted; nothing of it is kept."""

    http_status = 422


class UnknownWorkflow(Rejected):
    """No workflow of this name is registered; the message lists those that are."""

    http_status = 404


class InvalidInput(Rejected):
    """An input is unknown, missing, or not what the workflow's signature says; the field is named."""


class PayloadTooLarge(Rejected):
    """The body or one of its fields exceeds a bound, which the message names."""

    http_status = 413


class NotReady(Rejected):
    """The workflow's stages are not all loaded."""

    retryable = True
    http_status = 503


class Overloaded(Rejected):
    """The set has as many requests in flight as it may."""

    retryable = True
    http_status = 429


class RequestFailed(OnePieceError):
    """An accepted request ended without a result."""


class StageFailed(RequestFailed):
    """A stage's own code failed; ``fields`` hold stage, node and the end of the traceback."""


class NodeLost(RequestFailed):
    """The node that held the request's work died."""

    retryable = True
    http_status = 502


class DeadlineExceeded(RequestFailed):
    """The deadline passed before the result was there."""

    http_status = 504


class RequestCancelled(RequestFailed):
    """The request was cancelled."""

    http_status = 409


class StoreFull(RequestFailed):
    """The result store's byte budget is used up."""

    retryable = True
    http_status = 507


class JoinBudgetExceeded(RequestFailed):
    """Inputs that wait for their siblings exceed the actor's budget."""

    retryable = True
    http_status = 507


class UnknownRequest(OnePieceError):
    """No request of this UID is known here."""

    http_status = 404


class OwnedElsewhere(OnePieceError):
    """Another proxy owns the request; ``fields["http"]`` says where that one answers."""

    retryable = True
    http_status = 307


class UnknownNode(OnePieceError):
    """No node of this name is in the set; the message lists those that are."""

    http_status = 404


class ResultGone(OnePieceError):
    """The result was fetched already, or its time to live is over."""

    http_status = 410


class PlacementError(OnePieceError):
    """A stage fits on no device; the message names its need and what the devices have."""

    http_status = 503


class LeadershipLost(OnePieceError):
    """This manager does not lead (any more): stop giving orders, and become a candidate again."""

    retryable = True


class SchemaMismatch(OnePieceError):
    """Two nodes hold different versions of a workflow; the message names both schemas."""


class NodeUnreachable(OnePieceError):
    """Nobody answers at the address."""

    retryable = True
    http_status = 503


class CodecError(OnePieceError):
    """A value has no form on the wire, or bytes from the wire follow no rule; the message names which."""


def name_of(error: OnePieceError) -> str:
    """The name under which an error travels, and is counted: of a class of this module."""
    return _kind_of(error).__name__


def known_name(name: object) -> str:
    """The name in an error as of ``to_wire``, whoever wrote it, if it is one of this module's."""
    return name if isinstance(name, str) and name in _KINDS else OnePieceError.__name__


def plainly(error: OnePieceError) -> OnePieceError:
    """An error of this module that says the same, whatever was made of its class; holds no traceback."""
    return OnePieceError.from_wire(_to_wire(error))


def fitting(wire: Mapping[str, Any]) -> dict[str, Any]:
    """An error as of ``to_wire``, of whoever wrote it, within the bounds that ``to_wire`` keeps."""
    return {
        "error": text_of(wire.get("error"), ERROR_SHOWN_BYTES_MAX),
        "message": text_of(wire.get("message")),
        "fields": _plain_fields(wire.get("fields")),
        "retryable": wire.get("retryable") is True,
    }


def shortened(wire: Mapping[str, Any]) -> dict[str, Any]:
    """The least of an error as of ``to_wire``: for where all of it is too much."""
    message = text_of(wire.get("message"), _SHORT_MESSAGE_BYTES)
    return {**fitting(wire), "message": message, "fields": {}}


def last_frame(error: OnePieceError) -> str | None:
    """Where the error's ``traceback`` field ends: ``file:line in function``; None without one."""
    lines = str(error.fields.get("traceback") or "").splitlines()
    for line in reversed(lines):
        found = re.match(r'[ |]*File "(.*)", line (\d+), in (.*)', line)
        if found is not None:
            return f"{found[1]}:{found[2]} in {found[3]}"
    return None


def _to_wire(error: OnePieceError) -> dict[str, Any]:
    kind = _kind_of(error)
    message = attribute(error, "message")
    fields = _plain_fields(attribute(error, "fields"))
    if kind is not type(error):
        fields.setdefault("cause", kind_name(error))
    return {
        "error": kind.__name__,
        "message": text_of(error if message is None else message),
        "fields": fields,
        "retryable": kind.retryable,
    }


def _kind_of(error: OnePieceError) -> type[OnePieceError]:
    """The class of this module that the error's is, or is derived from."""
    own = frozenset(_KINDS.values())
    return next(each for each in type.mro(type(error)) if each in own)


def _plain_fields(fields: Any) -> dict[str, Any]:
    found = plain(fields, ERROR_FIELDS_BYTES_MAX)
    return found if isinstance(found, dict) else {}


def _all_kinds(root: type[OnePieceError]) -> dict[str, type[OnePieceError]]:
    kinds = {root.__name__: root}
    for kind in root.__subclasses__():
        kinds.update(_all_kinds(kind))
    return kinds


def _rebuild(name: str, message: str, fields: dict[str, Any]) -> OnePieceError:
    kind = _KINDS.get(name)
    if kind is None:
        return OnePieceError(f"{name}: {message}", **fields)
    return kind(message, **fields)


_KINDS: Final = _all_kinds(OnePieceError)
"""Those of this module: others are derived from them later, by anybody, with constructors of their own."""
