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
"""

# ruff: noqa: N818  # named by what the caller can do, not by being an error

import re
from collections.abc import Mapping
from typing import Any, ClassVar


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
        return _rebuild, (type(self).__name__, self.message, self.fields)

    def to_wire(self) -> dict[str, Any]:
        """The error as a map of plain values, whose texts can all be written as UTF-8."""
        return {
            "error": type(self).__name__,
            "message": encodable(self.message),
            "fields": _encodable_tree(self.fields),
            "retryable": self.retryable,
        }

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


def encodable(text: str) -> str:
    r"""The text with ``\udc80`` for a surrogate, which has no form in UTF-8.

    Errors quote what they were given, file names and broken texts too; telling of them must not fail.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def last_frame(error: OnePieceError) -> str | None:
    """Where the error's ``traceback`` field ends: ``file:line in function``; None without one."""
    lines = str(error.fields.get("traceback") or "").splitlines()
    for line in reversed(lines):
        found = re.match(r' *File "(.*)", line (\d+), in (.*)', line)
        if found is not None:
            return f"{found[1]}:{found[2]} in {found[3]}"
    return None


def _encodable_tree(tree: Any) -> Any:
    match tree:
        case str():
            return encodable(tree)
        case Mapping():
            return {_encodable_tree(key): _encodable_tree(value) for key, value in tree.items()}
        case list() | tuple():
            return [_encodable_tree(item) for item in tree]
        case _:
            return tree


def _all_kinds(root: type[OnePieceError]) -> dict[str, type[OnePieceError]]:
    kinds = {root.__name__: root}
    for kind in root.__subclasses__():
        kinds.update(_all_kinds(kind))
    return kinds


def _rebuild(name: str, message: str, fields: dict[str, Any]) -> OnePieceError:
    kind = _all_kinds(OnePieceError).get(name)
    if kind is None:
        return OnePieceError(f"{name}: {message}", **fields)
    return kind(message, **fields)
