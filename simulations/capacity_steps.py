"""Which stages a request goes through: a workflow of the capacity model as its simulation walks it."""

from attrs import frozen

from onepiece.core.capacity import CapacityModel, Demand


@frozen
class Step:
    """A stage as a workflow's step, and where in the workflow it goes on from there."""

    stage: str
    after: tuple[int, ...]
    """The steps that come after it."""
    is_join: bool


def steps_of(model: CapacityModel, demand: Demand) -> tuple[Step, ...]:
    """The steps of the workflow that is asked for."""
    steps = model.shape(demand.workflow).steps
    return tuple(
        Step(
            step.stage,
            tuple(place for place, later in enumerate(steps) if step.name in later.after),
            step.is_join,
        )
        for step in steps
    )
