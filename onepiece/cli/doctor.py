"""``onepiece doctor``: what the machine has for the transports, and what would fix what is missing."""

import argparse
import json

from attrs import asdict

from transports.diagnosis import Finding, State, diagnose


def run(arguments: argparse.Namespace) -> int:
    """Look and print; the exit status is 0, since nothing of it has to be there."""
    findings = diagnose()
    if arguments.json:
        words = [asdict(finding) | {"state": finding.state.value} for finding in findings]
        print(json.dumps(words, indent=2))
    else:
        print("".join(text_of(finding) for finding in findings), end="")
    return 0


def text_of(finding: Finding) -> str:
    """A finding for people: a line, and a second one for what to do."""
    mark = "ok     " if finding.state is State.THERE else "missing"
    fix = f"          do: {finding.fix}\n" if finding.fix else ""
    return f"{mark}   {finding.subject}: {finding.text}\n{fix}"
