"""``onepiece profile``: what each stage of a workflow takes, measured in this process, into a file."""

import asyncio
import sys
from pathlib import Path

from onepiece._bounded import text_of
from onepiece.cli.columns import bytes_text, columns, seconds_text
from onepiece.cli.inputs import read_inputs
from onepiece.client.api import describe_workflow, terms_of
from onepiece.core.inventory import Device
from onepiece.errors import ConfigError
from onepiece.graph import check_inputs
from onepiece.log import configure
from onepiece.profiles import WorkflowProfile, read_profile, write_profile
from onepiece.runtime.devices import discover_devices, parse_device
from onepiece.runtime.profiling import SAMPLES_MAX, ProfileOptions, profile_workflow
from onepiece.runtime.workflows import import_workflow


def run(
    reference: str,
    *,
    inputs: list[str],
    output: Path,
    samples: int,
    warm_up: int,
    size_class: str,
    device: str | None,
) -> None:
    """Measure, write the file, and print what was measured.

    Args:
        reference: ``module:workflow``.
        inputs: As ``name=text``.
        output: The file; timings of other size classes that it holds are kept.
        samples: Runs that count.
        warm_up: Runs before them.
        size_class: What requests with these inputs are called.
        device: As ``cuda:0``; the first one of this machine if None.

    Raises:
        ConfigError: An argument is wrong, the file is of another workflow, a stage cannot be loaded.
        InvalidInput: The inputs are not those of the workflow, or no request can name the size class.
        OnePieceError: A stage failed.
    """
    if not (1 <= samples <= SAMPLES_MAX and 0 <= warm_up <= SAMPLES_MAX):
        raise ConfigError(f"--samples is a number from 1 to {SAMPLES_MAX}, --warm-up from 0 to that")
    terms_of("", 0, size_class)  # what no request can say is not worth measuring
    configure()
    workflow = import_workflow(reference)
    known = read_profile(output) if output.exists() else None
    given = check_inputs(workflow.graph, read_inputs(describe_workflow(workflow.graph), inputs))
    options = ProfileOptions(samples, warm_up, size_class, told=_tell)
    profile = asyncio.run(profile_workflow(workflow, given, _device(device), options))
    if known is not None:
        profile = known.with_timings_of(profile)
    try:
        write_profile(output, profile)
    except OSError as error:
        raise ConfigError(f"the profile {output} cannot be written: {text_of(error)}") from error
    _tell("")
    print(_table(profile, size_class))
    print(f"written to {output}")


def _device(text: str | None) -> Device:
    return discover_devices()[0] if text is None else parse_device(text)


def _tell(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{line}")
        sys.stderr.flush()


def _table(profile: WorkflowProfile, size_class: str) -> str:
    rows = []
    for stage in profile.stages:
        timing = stage.timing(size_class)
        rows.append(
            (
                stage.stage,
                stage.kind.value,
                seconds_text(timing.mean_seconds),
                seconds_text(timing.spread_seconds),
                bytes_text(stage.memory_bytes),
                seconds_text(stage.load_seconds),
                bytes_text(stage.output_bytes),
            )
        )
    head = ("stage", "wants", "mean", "spread", "memory", "load", "sends")
    return f"{profile.workflow} on {profile.measured_on}\n\n{columns(head, rows)}\n"
