"""A workflow's steps as a simulated set follows them."""

from attrs import frozen

from onepiece.core.capacity import CapacityModel, Demand


@frozen
class Step:
    """A step of a workflow, by number."""

    stage: str
    after: tuple[int, ...]
    """The steps that come after it."""
    is_join: bool


def steps_of(model: CapacityModel, demand: Demand) -> tuple[Step, ...]:
    """The steps of a demand's workflow, in order."""
    steps = model.shape(demand.workflow).steps
    return tuple(
        Step(
            step.stage,
            tuple(place for place, later in enumerate(steps) if step.name in later.after),
            step.is_join,
        )
        for step in steps
    )
