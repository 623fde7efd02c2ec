"""The form parser, from any pieces and against any bytes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepiece import limits
from onepiece.errors import InvalidInput, PayloadTooLarge
from onepiece.node.http_multipart import PARTS_MAX, FormReader

CONTENT_TYPE = "multipart/form-data; boundary=b0undary"
NAMES = st.text("abcdefgh_", min_size=1, max_size=8).filter(lambda name: name != "request")


def form(parts: dict[str, tuple[bytes, bool]]) -> bytes:
    """A form as a client writes it."""
    body = b""
    for name, (data, is_file) in parts.items():
        filename = b'; filename="f"' if is_file else b""
        body += b'--b0undary\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (
            name.encode(),
            filename,
            data,
        )
    return body + b"--b0undary--\r\n"


def read(body: bytes, cuts: list[int], json_bytes_max: int = 1000) -> tuple[FormReader, list[bytes]]:
    """A reader that has got the body, cut at these places, and what it announced as the request."""
    announced: list[bytes] = []
    reader = FormReader(CONTENT_TYPE, json_bytes_max, lambda data: announced.append(bytes(data)))
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        reader.feed(body[start:end])
    return reader, announced


@given(
    parts=st.dictionaries(NAMES, st.tuples(st.binary(max_size=200), st.booleans()), max_size=5),
    request=st.binary(max_size=50),
    cuts=st.lists(st.integers(0, 10_000), max_size=8),
)
def test_a_form_is_read_from_any_pieces(
    parts: dict[str, tuple[bytes, bool]], request: bytes, cuts: list[int]
) -> None:
    """However the network cuts it, each part comes out as it went in, the request's when it ends."""
    whole = {"request": (request, False), **parts}
    if any(b"\r\n--b0undary" in b"\r\n" + data for data, _ in whole.values()):
        return  # a client would choose another boundary
    reader, announced = read(form(whole), cuts)
    found = {name: (bytes(part.data), part.is_file) for name, part in reader.finish().items()}
    assert found == whole
    assert announced == [request]


@given(body=st.binary(max_size=300), prefix=st.booleans(), cuts=st.lists(st.integers(0, 300), max_size=4))
def test_any_bytes_are_a_form_or_the_clients_error(body: bytes, prefix: bool, cuts: list[int]) -> None:
    """Nothing but a named error comes of bytes that are no form."""
    if prefix:
        body = b'--b0undary\r\nContent-Disposition: form-data; name="x"\r\n\r\n' + body
    try:
        reader, _ = read(body, cuts)
        reader.finish()
    except (InvalidInput, PayloadTooLarge):
        pass


@pytest.mark.parametrize(
    ("name", "is_file", "bound"),
    [
        ("request", False, 1000),
        ("text", False, limits.TEXT_INPUT_BYTES_MAX),
        ("file", True, limits.BYTES_INPUT_BYTES_MAX),
    ],
)
def test_each_part_has_its_bound(name: str, is_file: bool, bound: int) -> None:
    """Up to its bound a part is taken; one byte more is refused while it arrives, and is named."""
    reader, _ = read(form({name: (bytes(bound), is_file)}), [])
    assert len(reader.finish()[name].data) == bound
    with pytest.raises(PayloadTooLarge, match=f"{name}.*{bound}"):
        read(form({name: (bytes(bound + 1), is_file)}), [])


def test_a_form_has_a_bounded_number_of_parts() -> None:
    """As many as a workflow can have inputs, and the request."""
    parts = {f"p{number}": (b"", False) for number in range(PARTS_MAX + 1)}
    with pytest.raises(PayloadTooLarge, match=str(PARTS_MAX)):
        read(form(parts), [])
