"""What a client sends to ``POST /v1/requests``: read within bounds, and turned into a submission.

Three forms::

    application/json                  {"workflow", "inputs", "timeout_seconds", "key"}
    multipart/form-data               the same in the field "request", and inputs as further fields:
                                      files are bytes, texts are read as the input's type says
    application/vnd.onepiece.value    inputs as ``onepiece.codec.pack`` lays them out (tensors too)

``workflow``, ``timeout_seconds`` and ``key`` may also come as query parameters and the header
``Idempotency-Key``. With ``?workflow=`` the request is admitted or rejected before one byte of its
body is read; without it a form's ``request`` field decides, if it comes first, before its files.
"""

import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import anyio
from anyio import to_thread
from attrs import define, evolve, field, frozen
from starlette.requests import Request

from onepiece import limits
from onepiece.client.api import (
    BASE64_KEY,
    JSON_CONTENT_TYPE,
    KEY_FORM,
    KEY_HEADER,
    MULTIPART_CONTENT_TYPE,
    PRIORITY_HEADER,
    REDIRECT_PARAMETER,
    REQUEST_PART,
    SIZE_CLASS_HEADER,
    TENANT_HEADER,
    describe_input,
    from_plain,
    is_key,
    strict_json,
    terms_of,
    value_from_text,
)
from onepiece.codec import VALUE_CONTENT_TYPE, CodecError, materialise, pack_inputs, unpack
from onepiece.errors import InvalidInput, PayloadTooLarge, UnknownWorkflow
from onepiece.graph import Kind, WorkflowGraph, check_inputs
from onepiece.node.frontend import Frontend
from onepiece.node.http_multipart import FormReader, Part
from onepiece.node.http_options import BodyBudget, ProxyOptions
from onepiece.requests import Terms

OFF_LOOP_BYTES: Final = 256 << 10
"""Larger bodies are parsed in a thread, so that other requests need not wait for it."""
T = TypeVar("T")
_FIELDS: Final = ("workflow", "inputs", "timeout_seconds", "key")


@frozen
class Submission:
    """A request as it goes to the node: its inputs fit the workflow's signature."""

    workflow: str
    inputs: Mapping[str, Any] = field(repr=False)
    timeout_seconds: float | None
    key: str | None
    terms: Terms
    place: str | None
    """What was taken for it before its body was read, if its workflow was known by then."""


@frozen
class _Wanted:
    """Everything but the inputs, from wherever it came."""

    workflow: str | None = None
    timeout_seconds: float | None = None
    key: str | None = None
    terms: Terms = field(factory=Terms)


@define
class _Place:
    """A place that is left again, unless the request comes to the node."""

    frontend: Frontend
    taken: str | None = None
    is_asked: bool = False

    def ask(self, wanted: _Wanted, length: int | None) -> None:
        """Take a place, once; raises why there is none."""
        if wanted.workflow is None or self.is_asked:
            return
        self.is_asked = True
        self.taken = self.frontend.take_place(
            wanted.workflow,
            length,
            timeout_seconds=wanted.timeout_seconds,
            key=wanted.key,
            terms=wanted.terms,
        )


@define
class SubmissionReader:
    """Reads submissions for one proxy."""

    frontend: Frontend
    options: ProxyOptions
    budget: BodyBudget

    async def read(self, request: Request) -> Submission:
        """Admit, read and check one request.

        Raises:
            Rejected: It is not admitted, or its body is too large, malformed, or not what the
                workflow's signature says.
        """
        wanted = _from_url(request)
        length = _content_length(request)
        kind, bound = self._kind(request)
        if length is not None and length > bound:
            raise PayloadTooLarge(
                f"the body has {length} bytes, and may have {bound} as {kind}" + _other_forms(kind),
                bound=bound,
            )
        place = _Place(self.frontend)
        try:
            place.ask(wanted, length)
            with self.budget.take(bound if length is None else length):
                return await self._read_in_time(kind, request, wanted, place, length, bound)
        except BaseException:
            self.frontend.leave_place(place.taken)
            raise

    async def _read_in_time(
        self, kind: str, request: Request, wanted: _Wanted, place: _Place, length: int | None, bound: int
    ) -> Submission:
        try:
            with anyio.fail_after(self.options.body_timeout_seconds):
                return await self._read_as(kind, request, wanted, place, length, bound)
        except TimeoutError:
            raise InvalidInput(
                f"the body did not arrive within {self.options.body_timeout_seconds} seconds"
            ) from None

    def _kind(self, request: Request) -> tuple[str, int]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        bounds = {
            JSON_CONTENT_TYPE: min(self.options.json_bytes_max, self.options.body_bytes_max),
            MULTIPART_CONTENT_TYPE: self.options.body_bytes_max,
            VALUE_CONTENT_TYPE: self.options.body_bytes_max,
        }
        if kind not in bounds:
            raise InvalidInput(
                f"the Content-Type is {kind[:80]!r}; it must be one of {', '.join(bounds)}",
                field="Content-Type",
            )
        return kind, bounds[kind]

    async def _read_as(
        self, kind: str, request: Request, wanted: _Wanted, place: _Place, length: int | None, bound: int
    ) -> Submission:
        pieces = _bounded(request, bound)
        if kind == MULTIPART_CONTENT_TYPE:
            return await self._read_form(request, pieces, wanted, place, length)
        body = bytearray()
        async for piece in pieces:
            body += piece
        if kind == VALUE_CONTENT_TYPE:
            return await self._submission(wanted, place, _packed_inputs, body)
        found, inputs = await _parse(_request_of, body, wanted)
        return await self._submission(found, place, _plain_inputs, inputs, size=len(body))

    async def _read_form(
        self,
        request: Request,
        pieces: AsyncIterator[bytes],
        wanted: _Wanted,
        place: _Place,
        length: int | None,
    ) -> Submission:
        announced: list[tuple[_Wanted, Mapping[str, Any]]] = []

        def on_request(data: bytearray) -> None:
            found, inputs = _request_of(data, wanted)
            announced.append((found, inputs))
            place.ask(found, length)

        json_bytes_max = min(self.options.json_bytes_max, OFF_LOOP_BYTES)
        form = FormReader(request.headers["content-type"], json_bytes_max, on_request)
        async for piece in pieces:
            form.feed(piece)
        parts = {name: part for name, part in form.finish().items() if name != REQUEST_PART}
        found, inputs = announced[0] if announced else (wanted, {})
        return await self._submission(found, place, _form_inputs, inputs, parts)

    async def _submission(
        self,
        wanted: _Wanted,
        place: _Place,
        read_inputs: Callable[..., Mapping[str, Any]],
        *raw: Any,
        size: int = 0,
    ) -> Submission:
        graph = self._graph(wanted, place)

        def checked(data: Any, *more: Any) -> dict[str, Any]:
            inputs = check_inputs(graph, read_inputs(graph, data, *more))
            pack_inputs(inputs)  # what fits its type may still be too much for a message
            return inputs

        inputs = await _parse(checked, *raw, size=size)
        return Submission(graph.name, inputs, wanted.timeout_seconds, wanted.key, wanted.terms, place.taken)

    def _graph(self, wanted: _Wanted, place: _Place) -> WorkflowGraph:
        known, workflow = self.frontend.workflows(), wanted.workflow
        if workflow is None:
            raise InvalidInput(
                "the field 'workflow' is missing: name one of " + (", ".join(sorted(known)) or "none"),
                field="workflow",
            )
        if workflow not in known:
            place.ask(wanted, None)  # the node may know more of why
            raise UnknownWorkflow(
                f"no workflow {workflow[:100]!r} is registered; there are: "
                + (", ".join(sorted(known)) or "none"),
                workflow=workflow[:100],
            )
        return known[workflow]


async def _parse(parse: Callable[..., T], data: Any, *more: Any, size: int = 0) -> T:
    """Carry out what takes time in proportion to a body; in a thread, if the body is large."""
    if max(size, len(data)) <= OFF_LOOP_BYTES:
        return parse(data, *more)
    return await to_thread.run_sync(parse, data, *more)


async def _bounded(request: Request, bound: int) -> AsyncIterator[bytes]:
    """The body's pieces as they come, counted: a body without a length stops at its bound, too."""
    seen = 0
    async for piece in request.stream():
        seen += len(piece)
        if seen > bound:
            raise PayloadTooLarge(f"the body exceeds {bound} bytes", bound=bound)
        yield piece


def _content_length(request: Request) -> int | None:
    text = request.headers.get("content-length")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        raise InvalidInput(f"the Content-Length {text[:40]!r} is no number", field="Content-Length")
    return int(text)


def _other_forms(kind: str) -> str:
    return "; send large inputs as multipart/form-data" if kind == JSON_CONTENT_TYPE else ""


def _from_url(request: Request) -> _Wanted:
    known = {"workflow", "timeout_seconds", REDIRECT_PARAMETER}
    unknown = set(request.query_params) - known
    if unknown:
        raise InvalidInput(
            f"unknown query parameter {min(unknown)[:60]!r}; known: {', '.join(sorted(known))}",
            field=min(unknown)[:60],
        )
    timeout: Any = request.query_params.get("timeout_seconds")
    if timeout is not None:
        with suppress(ValueError):  # the check names the field and the text
            timeout = float(timeout)
    wanted = _checked(request.query_params.get("workflow"), timeout, request.headers.get(KEY_HEADER))
    return evolve(wanted, terms=_terms(request))


def _terms(request: Request) -> Terms:
    priority: Any = request.headers.get(PRIORITY_HEADER, "0")
    with suppress(ValueError):  # the check names the field and the text
        priority = int(priority)
    tenant, size_class = request.headers.get(TENANT_HEADER, ""), request.headers.get(SIZE_CLASS_HEADER, "")
    return terms_of(tenant, priority, size_class)


def _request_of(data: bytes | bytearray, wanted: _Wanted) -> tuple[_Wanted, Mapping[str, Any]]:
    """Read the JSON form of a request; what the URL said as well must not differ."""
    try:
        found = strict_json(data)
    except ValueError as error:  # UnicodeDecodeError is one, too
        raise InvalidInput(f"the request is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"the request is a JSON {type(found).__name__} where an object is wanted")
    for name in found:
        if name not in _FIELDS:
            raise InvalidInput(f"unknown field {name[:60]!r}; known: {', '.join(_FIELDS)}", field=name[:60])
    inputs = found.get("inputs")
    if inputs is None:
        inputs = {}
    if not isinstance(inputs, dict):
        raise InvalidInput(
            f"the field 'inputs' is a {type(inputs).__name__} where an object is wanted", field="inputs"
        )
    said = _checked(found.get("workflow"), found.get("timeout_seconds"), found.get("key"))
    return _merged(wanted, said), inputs


def _merged(url: _Wanted, body: _Wanted) -> _Wanted:
    for name in ("workflow", "timeout_seconds", "key"):
        first, second = getattr(url, name), getattr(body, name)
        if first is not None and second is not None and first != second:
            raise InvalidInput(
                f"the field {name!r} is {second!r} in the body and {first!r} in the URL or header: "
                "say it once",
                field=name,
            )
        if first is None:
            url = evolve(url, **{name: second})
    return url


def _checked(workflow: Any, timeout_seconds: Any, key: Any) -> _Wanted:
    if workflow is not None and not isinstance(workflow, str):
        raise InvalidInput(
            f"the field 'workflow' is a {type(workflow).__name__} where a str is wanted", field="workflow"
        )
    if timeout_seconds is not None:
        is_number = isinstance(timeout_seconds, int | float) and not isinstance(timeout_seconds, bool)
        in_range = is_number and 0 < timeout_seconds <= limits.TIMEOUT_SECONDS_MAX
        if not in_range or not math.isfinite(timeout_seconds):
            raise InvalidInput(
                f"the field 'timeout_seconds' is {str(timeout_seconds)[:40]!r}: give a number above 0 and at "
                f"most {limits.TIMEOUT_SECONDS_MAX:.0f}",
                field="timeout_seconds",
            )
        timeout_seconds = float(timeout_seconds)
    if key is not None and not (isinstance(key, str) and is_key(key)):
        raise InvalidInput(f"the field 'key' is {str(key)[:40]!r}: {KEY_FORM}", field="key")
    return _Wanted(workflow, timeout_seconds, key)


def _plain_inputs(graph: WorkflowGraph, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs that came as JSON."""
    found: dict[str, Any] = {}
    for name, plain in inputs.items():
        parameter = graph.input(name)
        if parameter is not None and parameter.type.kind is Kind.BYTES and isinstance(plain, str):
            raise InvalidInput(
                f"input {name!r} is a text where bytes are wanted: in JSON give "
                f'{{"{BASE64_KEY}": "..."}}, or send the file as multipart/form-data',
                field=name,
                expected="bytes",
            )
        try:
            found[name] = from_plain(plain)
        except InvalidInput as error:
            raise InvalidInput(f"input {name!r}: {error.message}", field=name) from error
    return found


def _form_inputs(
    graph: WorkflowGraph, inputs: Mapping[str, Any], parts: Mapping[str, Part]
) -> dict[str, Any]:
    """Inputs of a form: those within its JSON, and its other fields."""
    found = _plain_inputs(graph, inputs)
    for name, part in parts.items():
        if name in found:
            raise InvalidInput(f"input {name!r} is there twice: in 'request' and as a field", field=name)
        parameter = graph.input(name)
        if part.is_file or parameter is None:
            found[name] = bytes(part.data)
            continue
        try:
            text = part.data.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"input {name!r} is no UTF-8: {error}", field=name) from error
        info = describe_input(name, parameter.type, parameter.required, parameter.default)
        found[name] = value_from_text(info, text)
    return found


def _packed_inputs(graph: WorkflowGraph, body: bytearray) -> dict[str, Any]:
    """Inputs that a client of ours packed."""
    try:
        values = unpack(memoryview(body), type(None)).values
    except CodecError as error:
        raise InvalidInput(f"the body is no {VALUE_CONTENT_TYPE}: {error.message}") from error
    found: dict[str, Any] = {}
    for name, value in values.items():
        parameter = graph.input(name)
        if parameter is None:
            return {name: None}  # check_inputs says which inputs there are
        try:
            found[name] = materialise(value, parameter.type)
        except CodecError as error:
            raise InvalidInput(
                f"workflow {graph.name!r}, input {name!r}: {error.message}",
                workflow=graph.name,
                field=name,
                expected=str(parameter.type),
            ) from error
    return found
