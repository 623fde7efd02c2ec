"""What is asked of etcd, over the HTTP gateway that each of its members serves (version 3.4 and later).

A call goes to the member that answered last, and to the next one if it does not answer within
``call_seconds``. So a transaction may be carried out twice, or long after it was given up; whoever sends
one says in its conditions what must still hold. Keys and values are bytes, revisions and leases integers.
"""

import base64
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import httpx
from attrs import define, field, frozen

_Read = TypeVar("_Read")
_SHOWN_CHARACTERS: Final = 200
_TRANSIENT: Final = frozenset({4, 14})
"""gRPC's codes for: took too long; not available now (no leader, stopping)."""


class EtcdUnreachableError(Exception):
    """No member answered; the message says what was tried. The call may have been carried out."""


class EtcdRefusedError(Exception):
    """etcd answered that it does not do this; nothing was changed."""


@frozen
class KeyValue:
    """A key as it is stored."""

    value: bytes
    created: int
    """The revision at which it came into being."""
    modified: int
    """The revision at which it was written last."""
    lease: int


@frozen
class Outcome:
    """What a transaction did: ``held`` says whether its conditions did."""

    held: bool
    revision: int
    """Of the store behind it; that of what it wrote, if it wrote."""
    found: Mapping[bytes, KeyValue]
    """What its reads found, where the conditions did not hold."""


def created_at(key: bytes, revision: int) -> Mapping[str, str]:
    """The condition that a key came into being at this revision; 0: that it is not there."""
    return {
        "key": _text(key),
        "target": "CREATE",
        "result": "EQUAL",
        "create_revision": str(revision),
    }


def modified_at(key: bytes, revision: int) -> Mapping[str, str]:
    """The condition that a key was written last at this revision; 0: that it is not there."""
    return {"key": _text(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def put(key: bytes, value: bytes, lease: int = 0) -> Mapping[str, Any]:
    """Write a key, for as long as the lease lasts if one is named."""
    return {"request_put": {"key": _text(key), "value": _text(value), "lease": str(lease)}}


def delete(key: bytes) -> Mapping[str, Any]:
    """Delete a key."""
    return {"request_delete_range": {"key": _text(key)}}


@define(eq=False)
class EtcdClient:
    """The members of one etcd; use ``open_client``."""

    members: tuple[str, ...]
    """``http://host:port`` each."""
    call_seconds: float
    _http: httpx.AsyncClient = field(repr=False)
    _first: int = field(default=0, init=False)
    """The member that answered last."""

    async def grant(self, seconds: int) -> tuple[int, int]:
        """A new lease, and for how many seconds it lasts: etcd may give more than was asked for."""
        return await self._call(
            "lease/grant", {"TTL": str(seconds)}, lambda answer: (int(answer["ID"]), int(answer["TTL"]))
        )

    async def keep_alive(self, lease: int) -> int:
        """Begin a lease anew; for how many seconds it lasts now, 0 if it is over."""
        return await self._call("lease/keepalive", {"ID": str(lease)}, _seconds_left)

    async def revoke(self, lease: int) -> None:
        """End a lease, and delete what was written under it; raises ``EtcdRefusedError`` if there is none."""
        await self._call("lease/revoke", {"ID": str(lease)}, _revision)

    async def read(self, prefix: bytes) -> dict[bytes, KeyValue]:
        """What is stored under all keys that begin so, as of one moment."""
        return await self._call("kv/range", _range(prefix), _stored)

    async def transact(
        self,
        conditions: Sequence[Mapping[str, str]],
        changes: Sequence[Mapping[str, Any]],
        otherwise: Sequence[bytes],
    ) -> Outcome:
        """Make all changes if all conditions hold, else read the keys with these prefixes."""
        reads = [{"request_range": _range(prefix)} for prefix in otherwise]
        body = {"compare": list(conditions), "success": list(changes), "failure": reads}
        return await self._call("kv/txn", body, _outcome)

    async def _call(
        self, path: str, body: Mapping[str, Any], read: Callable[[Mapping[str, Any]], _Read]
    ) -> _Read:
        tried: list[str] = []
        for step in range(len(self.members)):
            number = (self._first + step) % len(self.members)
            try:
                answer = _as_read(read, await self._ask(f"{self.members[number]}/v3/{path}", body))
            except _NotAnsweredError as error:
                tried.append(f"{self.members[number]} ({error})")
                continue
            self._first = number
            return answer
        raise EtcdUnreachableError(
            f"no member of etcd answered within {self.call_seconds:g} s: {', '.join(tried)}"
        )

    async def _ask(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            response = await self._http.post(url, json=body)
        except (httpx.HTTPError, OSError) as error:  # alerts of TLS come as they are
            raise _NotAnsweredError(str(error) or type(error).__name__) from error
        try:
            answer = response.json()
        except ValueError as error:
            raise _NotAnsweredError(f"status {response.status_code}, not the answer of an etcd") from error
        if response.status_code == httpx.codes.OK and isinstance(answer, dict) and "error" not in answer:
            return answer
        code = answer.get("code") if isinstance(answer, dict) else None
        what = str(answer.get("message") if code is not None else answer)[:_SHOWN_CHARACTERS]
        if code is None or code in _TRANSIENT:
            raise _NotAnsweredError(f"status {response.status_code}: {what}")
        raise EtcdRefusedError(what)


class _NotAnsweredError(Exception):
    """This member did not answer, or is not able to."""


@asynccontextmanager
async def open_client(
    members: tuple[str, ...], call_seconds: float, tls: ssl.SSLContext | None = None
) -> AsyncIterator[EtcdClient]:
    """A client of these members (``http://host:port`` or ``https://host:port``); nothing is sent yet."""
    verify: ssl.SSLContext | bool = True if tls is None else tls
    async with httpx.AsyncClient(timeout=call_seconds, trust_env=False, verify=verify) as http:
        yield EtcdClient(members, call_seconds, http)


def _range(prefix: bytes) -> dict[str, str]:
    return {"key": _text(prefix), "range_end": _text(prefix[:-1] + bytes([prefix[-1] + 1]))}


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _as_read(read: Callable[[Mapping[str, Any]], _Read], answer: Mapping[str, Any]) -> _Read:
    """What an answer says; whatever else serves HTTP there may answer in JSON, too."""
    try:
        return read(answer)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise _NotAnsweredError("an answer in JSON, but not that of an etcd") from error


def _revision(answer: Mapping[str, Any]) -> int:
    return int(answer["header"]["revision"])


def _seconds_left(answer: Mapping[str, Any]) -> int:
    return int(answer["result"].get("TTL", 0))


def _outcome(answer: Mapping[str, Any]) -> Outcome:
    held = answer.get("succeeded", False) is True
    found: dict[bytes, KeyValue] = {}
    for response in () if held else answer.get("responses", ()):
        found |= _key_values(response["response_range"])
    return Outcome(held, _revision(answer), found)


def _stored(answer: Mapping[str, Any]) -> dict[bytes, KeyValue]:
    _revision(answer)  # an etcd says it also where nothing is stored
    return _key_values(answer)


def _key_values(answer: Mapping[str, Any]) -> dict[bytes, KeyValue]:
    return {
        base64.b64decode(each["key"]): KeyValue(
            value=base64.b64decode(each.get("value", "")),
            created=int(each["create_revision"]),
            modified=int(each["mod_revision"]),
            lease=int(each.get("lease", 0)),
        )
        for each in answer.get("kvs", [])
    }
