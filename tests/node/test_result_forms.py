"""A result in other forms than the stored one: which there are, and what they cannot hold."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from onepiece.codec import VALUE_CONTENT_TYPE, value_from_bytes
from tests.node.proxy_set import proxy


async def test_numbers_that_json_lacks_are_null_there_and_themselves_as_stored() -> None:
    """NaN and infinities make no broken JSON, and are not lost to those who take the stored form."""
    async with proxy() as served:
        uid = await served.submit()
        served.frontend.finish(uid, [1.5, math.nan, -math.inf])
        path = f"/v1/requests/{uid}/result?keep=1"
        assert (await served.http.get(path)).content == b"[1.5, null, null]"
        answer = await served.http.get(path, headers={"Accept": VALUE_CONTENT_TYPE})
        one, two, three = value_from_bytes(answer.content)
        assert one == 1.5
        assert math.isnan(two)
        assert three == -math.inf


@pytest.mark.parametrize(
    ("value", "accept", "forms"),
    [
        ("a text", "application/octet-stream", (VALUE_CONTENT_TYPE, "application/json")),
        (b"bytes", "video/mp4", (VALUE_CONTENT_TYPE, "application/octet-stream", "application/json")),
    ],
)
async def test_a_refusal_names_every_form_that_there_is(
    value: Any, accept: str, forms: Sequence[str]
) -> None:
    """406 names the stored form and all that the value can be converted to."""
    async with proxy() as served:
        uid = await served.submit()
        served.frontend.finish(uid, value)
        answer = await served.http.get(f"/v1/requests/{uid}/result", headers={"Accept": accept})
        assert answer.status_code == 406
        assert " or ".join(forms) in answer.json()["message"]
