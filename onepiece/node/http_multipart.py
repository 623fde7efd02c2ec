"""A multipart form, parsed as it arrives: each part is bounded, and the request comes before its files."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import define, field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from onepiece import limits
from onepiece.client.api import REQUEST_PART
from onepiece.errors import InvalidInput, PayloadTooLarge

PARTS_MAX: Final = limits.PARAMETERS_MAX + 1


@define
class Part:
    """One field of a form."""

    name: str
    is_file: bool
    data: bytearray = field(factory=bytearray, repr=False)


class FormReader:
    """Takes a form's bytes as they come.

    Args:
        content_type: The request's header, with the boundary.
        json_bytes_max: The bound of the part ``request``.
        on_request: Called when the part ``request`` is complete; may raise to reject what follows.

    Raises:
        InvalidInput: There is no boundary.
    """

    def __init__(
        self, content_type: str, json_bytes_max: int, on_request: Callable[[bytearray], None]
    ) -> None:
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if not boundary:
            raise InvalidInput("the Content-Type multipart/form-data names no boundary")
        self._json_bytes_max = json_bytes_max
        self._on_request = on_request
        self._parts: dict[str, Part] = {}
        self._part: Part | None = None
        self._headers: dict[bytes, bytes] = {}
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._ended = False
        callbacks: Mapping[str, Any] = {
            "on_part_begin": self._headers.clear,
            "on_header_field": self._on_header_field,
            "on_header_value": self._on_header_value,
            "on_header_end": self._on_header_end,
            "on_headers_finished": self._on_headers_finished,
            "on_part_data": self._on_part_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }
        try:
            self._parser = MultipartParser(boundary, dict(callbacks))  # type: ignore[arg-type]  # its TypedDict wants literal keys
        except FormParserError as error:
            raise InvalidInput(f"the multipart boundary is unusable: {error}") from error

    def feed(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            InvalidInput: They are no form, or a part has no name or one that was there.
            PayloadTooLarge: A part exceeds its bound, or there are too many.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidInput(f"the multipart body is damaged: {error}") from error

    def finish(self) -> Mapping[str, Part]:
        """All parts by name, ``request`` included if it was there.

        Raises:
            InvalidInput: The form is cut short.
        """
        if not self._ended:
            raise InvalidInput("the multipart body is cut short: its closing boundary is missing")
        return self._parts

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[bytes(self._header_name).lower()] = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _on_headers_finished(self) -> None:
        disposition, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if disposition != b"form-data" or not name:
            raise InvalidInput("a part of the multipart body has no Content-Disposition with a name")
        if name in self._parts:
            raise InvalidInput(f"the multipart field {name[:60]!r} is there twice", field=name[:60])
        if len(self._parts) == PARTS_MAX:
            raise PayloadTooLarge(f"the multipart body has more than {PARTS_MAX} fields")
        self._part = Part(name, b"filename" in options)
        self._parts[name] = self._part

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        assert part is not None, "data comes behind headers"
        bound = self._bound(part)
        if len(part.data) + end - start > bound:
            raise PayloadTooLarge(
                f"the multipart field {part.name[:60]!r} exceeds {bound} bytes",
                field=part.name[:60],
                bound=bound,
            )
        part.data += memoryview(data)[start:end]

    def _bound(self, part: Part) -> int:
        if part.name == REQUEST_PART:
            return self._json_bytes_max
        return limits.BYTES_INPUT_BYTES_MAX if part.is_file else limits.TEXT_INPUT_BYTES_MAX

    def _on_part_end(self) -> None:
        part = self._part
        assert part is not None, "a part ends behind its headers"
        if part.name == REQUEST_PART:
            self._on_request(part.data)

    def _on_end(self) -> None:
        self._ended = True
