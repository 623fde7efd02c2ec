"""Whether a workflow that is offered goes together with those that are registered.

Nodes import workflows themselves, so two versions of one name, or of a stage that two workflows share, would
exchange values that do not fit. What is refused is told with both versions. An equal
offer is no change, and one that is said to replace the known version is not compared with it.
"""

from onepiece.core.inventory import RegisteredWorkflow


def why_not_same(known: RegisteredWorkflow | None, offered: RegisteredWorkflow) -> str | None:
    """Why a workflow is not the one that is registered under its name; None if there is none."""
    if known is None:
        return None
    if known.digest == offered.digest and known.module == offered.module:
        return (
            f"workflow {offered.name!r} is registered with other resources: {known.stages!r}; "
            f"offered were {offered.stages!r}"
        )
    return (
        f"another version of workflow {offered.name!r} is registered; install the same on all nodes. "
        f"Registered ({known.module}, digest {known.digest}):\n{known.schema_text}\n"
        f"Offered ({offered.module}, digest {offered.digest}):\n{offered.schema_text}"
    )


def why_not_shared(others: tuple[RegisteredWorkflow, ...], offered: RegisteredWorkflow) -> str | None:
    """Why stages that it shares with other workflows are not the same there."""
    needs = {need.stage: need for need in offered.stages}
    for workflow in others:
        for need in workflow.stages:
            if needs.get(need.stage, need) != need:
                return (
                    f"workflows {workflow.name!r} and {offered.name!r} share the stage {need.stage} in "
                    f"different versions: {need!r} and {needs[need.stage]!r}"
                )
    return None
