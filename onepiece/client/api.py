"""The HTTP API's words and forms, the same at both of its ends.

JSON carries what it can; bytes inside JSON are ``{"$base64": "..."}``. Unknown fields in what comes
from a proxy are passed over: a client goes on working with a proxy that says more than it knows.
"""

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
from attrs import field, frozen

from onepiece._bounded import shown, text_of
from onepiece.errors import InvalidInput
from onepiece.graph import Kind, Parameter, TypeSpec, WorkflowGraph
from onepiece.limits import PRIORITY_MAX, SIZE_CLASS_CHARACTERS_MAX, TENANT_CHARACTERS_MAX
from onepiece.requests import EventKind, RequestEvent, RequestState, RequestStatus, Terms

JSON_CONTENT_TYPE: Final = "application/json"
BYTES_CONTENT_TYPE: Final = "application/octet-stream"
EVENTS_CONTENT_TYPE: Final = "text/event-stream"
MULTIPART_CONTENT_TYPE: Final = "multipart/form-data"
KEY_HEADER: Final = "Idempotency-Key"
TENANT_HEADER: Final = "OnePiece-Tenant"
PRIORITY_HEADER: Final = "OnePiece-Priority"
SIZE_CLASS_HEADER: Final = "OnePiece-Size-Class"
REDIRECT_PARAMETER: Final = "redirect"
"""``redirect=0``: a refused request is told so, and not sent on to another set."""
KEY_CHARACTERS_MAX: Final = 256
KEY_FORM: Final = f"give 1 to {KEY_CHARACTERS_MAX} printable ASCII characters"
BASE64_KEY: Final = "$base64"
REQUEST_PART: Final = "request"
"""The multipart field that holds the JSON; every other field is an input."""


def is_key(text: str) -> bool:
    """Whether it can be an idempotency key: a header can hold it."""
    return text.isascii() and text.isprintable() and 0 < len(text) <= KEY_CHARACTERS_MAX


def terms_of(tenant: Any, priority: Any, size_class: Any) -> Terms:
    """What a submitter says of a request; ``InvalidInput`` names what cannot be."""
    for name, text, bound in (
        ("tenant", tenant, TENANT_CHARACTERS_MAX),
        ("size_class", size_class, SIZE_CLASS_CHARACTERS_MAX),
    ):
        if not (isinstance(text, str) and text.isascii() and (text.isprintable() and len(text) <= bound)):
            raise InvalidInput(
                f"the {name} is {str(text)[:40]!r}: give up to {bound} printable ASCII characters", field=name
            )
    if not isinstance(priority, int) or not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise InvalidInput(
            f"the priority is {str(priority)[:40]!r}: give a whole number from -{PRIORITY_MAX} to "
            f"{PRIORITY_MAX}",
            field="priority",
        )
    return Terms(tenant, priority, size_class)


def to_plain(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """A value as JSON can hold it: bytes in base64, tuples as lists, numbers that are none as null.

    What has no such form, a tensor for instance, stays as it is, or becomes what ``other`` makes of it.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return {BASE64_KEY: base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {text_of(key): to_plain(item, other) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, other) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if attrs.has(type(value)):
        return {each.name: to_plain(getattr(value, each.name), other) for each in attrs.fields(type(value))}
    is_plain = value is None or isinstance(value, str | int | float)
    return value if is_plain or other is None else other(value)


def from_plain(value: Any) -> Any:
    """The value that JSON held: ``{"$base64": "..."}`` is bytes.

    Raises:
        InvalidInput: What claims to be base64 is not.
    """
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {BASE64_KEY}:
        return {key: from_plain(item) for key, item in value.items()}
    try:
        return base64.b64decode(value[BASE64_KEY], validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise InvalidInput(f"the text under {BASE64_KEY!r} is no base64: {error}") from error


def status_to_plain(status: RequestStatus) -> dict[str, Any]:
    """A request's status for JSON."""
    plain: dict[str, Any] = to_plain(
        attrs.asdict(status, recurse=False) | {"state": status.state.value}, shown
    )
    return plain


def status_from_plain(plain: Mapping[str, Any]) -> RequestStatus:
    """The status that a proxy sent."""
    known = _known_fields(RequestStatus, plain)
    return RequestStatus(**known | {"state": RequestState(plain["state"])})


def event_to_plain(event: RequestEvent) -> dict[str, Any]:
    """An event for JSON."""
    plain: dict[str, Any] = to_plain(attrs.asdict(event, recurse=False) | {"kind": event.kind.value}, shown)
    return plain


def event_from_plain(plain: Mapping[str, Any]) -> RequestEvent:
    """The event that a proxy sent."""
    known = _known_fields(RequestEvent, plain)
    detail = from_plain(dict(plain.get("detail") or {}))
    return RequestEvent(**known | {"kind": EventKind(plain["kind"]), "detail": detail})


def _known_fields(cls: type[attrs.AttrsInstance], plain: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: plain[each.name] for each in attrs.fields(cls) if each.name in plain}


@frozen
class InputInfo:
    """An input of a workflow, as a client needs to know it."""

    name: str
    type: str
    """As one writes it in Python."""
    kinds: Sequence[str]
    """The forms it may have: one, or a union's members."""
    choices: Sequence[Any] | None
    """A ``Literal``'s values."""
    required: bool
    default: Any = None


@frozen
class WorkflowInfo:
    """A registered workflow."""

    name: str
    module: str
    inputs: Sequence[InputInfo]
    returns: str
    stages: Mapping[str, str]
    """Graph node -> the signature of its stage."""
    digest: str
    schema_text: str


@frozen
class NodeInfo:
    """A node of the set, as the proxy that was asked sees it."""

    node: str
    state: str
    """``alive``, ``draining``, ``drained`` (it holds nothing and gets no new work) or ``suspect``."""
    address: str
    http: str | None = None
    incarnation: int = 0
    roles: Sequence[str] = ()
    devices: Sequence[str] = ()
    actors: Sequence[Mapping[str, Any]] = field(factory=list)
    process_id: int = 0
    heartbeat_age_seconds: float | None = None
    """None before the first heartbeat was heard."""
    waits_for: Sequence[str] = ()
    """In words, what it still holds if it drains; in answers about one node alone."""


def describe_workflow(graph: WorkflowGraph) -> WorkflowInfo:
    """What a client is told of a workflow."""
    return WorkflowInfo(
        name=graph.name,
        module=graph.module,
        inputs=[_describe_input(parameter) for parameter in graph.inputs],
        returns=str(graph.returns),
        stages={node.id: graph.stages[node.stage].signature for node in graph.nodes},
        digest=graph.digest,
        schema_text=graph.schema_text,
    )


def workflow_from_plain(plain: Mapping[str, Any]) -> WorkflowInfo:
    """The description that a proxy sent."""
    known = _known_fields(WorkflowInfo, plain)
    inputs = [
        InputInfo(**_known_fields(InputInfo, each) | {"default": from_plain(each.get("default"))})
        for each in plain["inputs"]
    ]
    return WorkflowInfo(**known | {"inputs": inputs})


def node_from_plain(plain: Mapping[str, Any]) -> NodeInfo:
    """The view of a node that a proxy sent."""
    return NodeInfo(**_known_fields(NodeInfo, plain))


def _describe_input(parameter: Parameter) -> InputInfo:
    return describe_input(parameter.name, parameter.type, parameter.required, parameter.default)


def describe_input(name: str, spec: TypeSpec, required: bool, default: Any) -> InputInfo:
    """What a client is told of one input."""
    members = spec.items if spec.kind is Kind.UNION else (spec,)
    choices = [value for member in members for value in member.values]
    return InputInfo(
        name=name,
        type=str(spec),
        kinds=[member.kind.value for member in members],
        choices=choices or None,
        required=required,
        default=default,
    )


def value_from_text(info: InputInfo, text: str) -> Any:
    """The input that a text stands for: of a form's field, or of ``--input name=text``.

    A text is taken as it is where the type allows a ``str``; else it is read as the type says, and
    as JSON where that is a list, a map, a record or anything. Bytes and tensors have no text.

    Raises:
        InvalidInput: The text stands for no value of the type; the input is named.
    """
    kinds = set(info.kinds)
    if info.choices and text in info.choices:
        return text
    if text == "null" and Kind.NONE.value in kinds:
        return None
    if Kind.STR.value in kinds:
        return text
    try:
        value = strict_json(text)
    except ValueError:
        if kinds & {Kind.ANY.value}:
            return text
        raise InvalidInput(
            f"input {info.name!r}: {text[:60]!r} where {info.type} is wanted" + _hint(kinds),
            field=info.name,
            expected=info.type,
        ) from None
    return from_plain(value)


def _hint(kinds: set[str]) -> str:
    if kinds & {Kind.BYTES.value}:
        return "; give a file"
    if kinds & {Kind.BOOL.value}:
        return "; give true or false"
    if kinds & {Kind.LIST.value, Kind.DICT.value, Kind.TUPLE.value, Kind.SEQUENCE.value, Kind.RECORD.value}:
        return "; give JSON"
    return ""


def strict_json(data: bytes | bytearray | str) -> Any:
    """Parse JSON as the standard says: no NaN, no key twice, no endless nesting.

    Raises:
        ValueError: It is none; the message says where.
    """
    try:
        return json.loads(data, parse_constant=_no_constant, object_pairs_hook=_no_repeated_keys)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _no_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated[:60]!r} stands there twice")
    return found
