"""A proxy's HTTP side as acceptance tests use it: the wire as a stranger sees it, without our client."""

import base64
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

import httpx
from attrs import define, field

from onepiece.codec import VALUE_CONTENT_TYPE, value_from_bytes

FINAL_STATES: Final = frozenset({"finished", "failed", "cancelled"})
END_SECONDS: Final = 90.0


@define(eq=False)
class Api:
    """One proxy."""

    url: str
    client: httpx.Client = field(init=False)

    @client.default
    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30.0, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def readiness(self) -> dict[str, Any]:
        """What ``/readyz`` says."""
        found: dict[str, Any] = self.client.get("/readyz").json()
        return found

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The members of the set by name."""
        answer = self.client.get("/v1/nodes")
        return {node["node"]: node for node in answer.raise_for_status().json()["nodes"]}

    def post(
        self,
        workflow: str,
        inputs: Mapping[str, Any] | None = None,
        *,
        timeout_seconds: float | None = 60.0,
        key: str | None = None,
    ) -> httpx.Response:
        """Submit a request; whatever the proxy answers."""
        body = {"workflow": workflow, "inputs": inputs or {}, "timeout_seconds": timeout_seconds, "key": key}
        return self.client.post("/v1/requests", json=body)

    def submit(self, workflow: str, inputs: Mapping[str, Any] | None = None, **more: Any) -> str:
        """Submit a request that must be accepted; its UID."""
        answer = self.post(workflow, inputs, **more)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["uid"])

    def submit_patiently(self, workflow: str, inputs: Mapping[str, Any] | None = None, **more: Any) -> str:
        """Submit a request, again and again while its stages are being loaded; its UID."""
        give_up_at = time.monotonic() + END_SECONDS
        while (answer := self.post(workflow, inputs, **more)).status_code == 503:
            assert answer.json()["error"] == "NotReady", answer.text
            assert time.monotonic() < give_up_at, answer.text
            time.sleep(0.02)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["uid"])

    def status(self, uid: str) -> dict[str, Any]:
        """A request's record."""
        found: dict[str, Any] = self.client.get(f"/v1/requests/{uid}").raise_for_status().json()
        return found

    def ended(self, uid: str, seconds: float = END_SECONDS) -> dict[str, Any]:
        """A request's record once it has ended."""
        return self.reached(uid, FINAL_STATES, seconds)

    def reached(self, uid: str, states: frozenset[str], seconds: float = END_SECONDS) -> dict[str, Any]:
        """A request's record once it is in one of these states."""
        give_up_at = time.monotonic() + seconds
        while True:
            status = self.status(uid)
            if status["state"] in states:
                return status
            assert time.monotonic() < give_up_at, f"after {seconds} s still {status}"
            time.sleep(0.02)

    def failed(self, uid: str) -> dict[str, Any]:
        """The error of a request that must fail."""
        status = self.ended(uid)
        assert status["state"] == "failed", status
        error: dict[str, Any] = status["error"]
        return error

    def result(self, uid: str) -> Any:
        """The result of a request that must finish; it stays in the store."""
        status = self.ended(uid)
        assert status["state"] == "finished", status
        answer = self.client.get(
            f"/v1/requests/{uid}/result",
            params={"keep": "1"},
            headers={"Accept": f"{VALUE_CONTENT_TYPE}, application/octet-stream"},
        )
        assert answer.status_code == 200, answer.text
        assert len(answer.content) == status["result_bytes"]
        if answer.headers["Content-Type"] == VALUE_CONTENT_TYPE:
            return value_from_bytes(answer.content)
        return answer.content

    def run(self, workflow: str, inputs: Mapping[str, Any] | None = None, **more: Any) -> Any:
        """Submit a request and return its result."""
        return self.result(self.submit(workflow, inputs, **more))

    def cancel(self, uid: str) -> dict[str, Any]:
        """Cancel a request; its record."""
        found: dict[str, Any] = self.client.delete(f"/v1/requests/{uid}").raise_for_status().json()
        return found

    def events(self, uid: str, after: int | None = None) -> Iterator[dict[str, Any]]:
        """A request's events until the stream ends; each must be framed as its text says."""
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        with self.client.stream("GET", f"/v1/requests/{uid}/events", headers=headers) as answer:
            if answer.status_code == 204:  # it has ended, and the client has seen that
                return
            assert answer.status_code == 200
            frame: dict[str, str] = {}
            for line in answer.iter_lines():
                if line:
                    name, _, value = line.partition(": ")
                    frame[name] = value
                elif "data" in frame:
                    event: dict[str, Any] = json.loads(frame["data"])
                    assert (frame["id"], frame["event"]) == (str(event["sequence"]), event["kind"])
                    yield event
                    frame = {}
                else:
                    frame = {}  # a comment that keeps the connection alive


def as_json(data: bytes) -> dict[str, str]:
    """Bytes as they stand in JSON."""
    return {"$base64": base64.b64encode(data).decode()}
