"""What `onepiece placement` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

from onepiece.cli.columns import bytes_text, columns, seconds_text


def placement_text(found: Mapping[str, Any]) -> str:
    """Tables of stages, moves and idle devices, and why there are no more moves."""
    head = ["STAGE", "WANTED", "READY", "LOADING", "LEAVING", "LIMITS", "BUSY", "RUN", "LOAD"]
    head += ["MEMORY", "TAKES", "PROBLEM"]
    parts = [columns(head, [_stage_row(stage) for stage in found["stages"]])]
    if found["rates"]:
        rates = ", ".join(f"{name} {rate:.3g}/s" for name, rate in found["rates"].items())
        parts.append(f"offered: {rates}")
    if found["moves"]:
        head = ["MOVE", "STAGE", "FROM", "WHERE", "AGO", "WHY"]
        parts.append(columns(head, [_move_row(move) for move in found["moves"]]))
    if found["idle"]:
        head = ["IDLE DEVICE", "MEMORY", "FOR", "LENT TO", "JOB", "FOR"]
        parts.append(columns(head, [_idle_row(device) for device in found["idle"]]))
        if (hidden := found["idle_count"] - len(found["idle"])) > 0:
            parts.append(f"and {hidden} more idle devices")
    why = found["reason"] or "nothing was looked at yet"
    counted = f"{found['done']} moves done, {found['given_back']} given back, {found['abandoned']} abandoned"
    parts.append(f"rebalance: {found['mode']}; {counted}; {why}")
    return "\n\n".join(parts)


def _stage_row(stage: Mapping[str, Any]) -> Sequence[str]:
    most = stage["instances_max"]
    return [
        stage["stage"],
        str(stage["wanted"]),
        str(stage["ready"]),
        str(stage["loading"]),
        str(stage["leaving"]),
        f"{stage['instances_min']}..{'' if most is None else most}",
        "-" if stage["utilisation"] is None else f"{stage['utilisation']:.0%}",
        _seconds(stage["seconds"]),
        _seconds(stage["load_seconds"]),
        bytes_text(stage["memory_bytes"]),
        "-" if stage["seen_bytes"] is None else bytes_text(stage["seen_bytes"]),
        stage["problem"] or "-",
    ]


def _move_row(move: Mapping[str, Any]) -> Sequence[str]:
    return [
        move["outcome"],
        move["stage"],
        "-" if move["donor"] == move["stage"] else move["donor"] or "idle",
        f"{move['node']}: {','.join(move['devices'])}",
        _seconds(move["seconds_ago"]),
        move["reason"],
    ]


def _idle_row(device: Mapping[str, Any]) -> Sequence[str]:
    job = device["job"] or "-"
    if job == "none":
        job = f"none (the last: {device['ended']})" if device["ended"] else "none yet"
    return [
        f"{device['node']}: {device['device']}",
        bytes_text(device["memory_bytes"]),
        seconds_text(device["idle_seconds"]),
        device["command"] or "-",
        job,
        seconds_text(device["job_seconds"]) if device["job"] else "-",
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds_text(value)
