"""Values in pieces of one size."""

from collections.abc import Iterator, Sequence

from transports.operations import Bytes


def cut(parts: Sequence[Bytes], chunk_bytes: int) -> Iterator[Bytes]:
    """Cut ``parts`` in chunks of one size, the last one shorter.

    A chunk that lies within one part is a view of it; only those that span parts are copied.
    """
    spanning = bytearray()
    for part in parts:
        view = memoryview(part)
        offset = 0
        if spanning:
            offset = min(chunk_bytes - len(spanning), len(view))
            spanning += view[:offset]
            if len(spanning) < chunk_bytes:
                continue
            yield spanning
            spanning = bytearray()
        while len(view) - offset >= chunk_bytes:
            yield view[offset : offset + chunk_bytes]
            offset += chunk_bytes
        spanning += view[offset:]
    if spanning:
        yield spanning
