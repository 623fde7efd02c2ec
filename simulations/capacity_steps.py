"""Which stages a request goes through: a workflow of the capacity model as its simulation walks it."""

from attrs import frozen

from onepiece.core.capacity import CapacityModel, Demand


@frozen
class Step:
    """A stage as a workflow's step, and where in the workflow it goes on from there."""

    name: str
    stage: str
    after: tuple[int, ...]
    """The steps that come after it."""
    is_join: bool


@frozen
class Way:
    """The steps of a workflow, and what of them each of its requests asks for."""

    steps: tuple[Step, ...]
    sources: tuple[int, ...]
    """For each step: how many steps it comes after."""
    entries: tuple[int, ...]
    """The steps that come after none."""
    joins: tuple[tuple[int, str], ...]
    """The steps whose inputs have to meet, each with its stage."""

    @classmethod
    def of(cls, model: CapacityModel, demand: Demand) -> "Way":
        """Of the workflow that is asked for."""
        steps = steps_of(model, demand)
        sources = [0] * len(steps)
        for step in steps:
            for after in step.after:
                sources[after] += 1
        return cls(
            steps,
            tuple(sources),
            tuple(place for place, count in enumerate(sources) if not count),
            tuple((place, step.stage) for place, step in enumerate(steps) if step.is_join),
        )


def steps_of(model: CapacityModel, demand: Demand) -> tuple[Step, ...]:
    """The steps of the workflow that is asked for."""
    steps = model.shape(demand.workflow).steps
    return tuple(
        Step(
            step.name,
            step.stage,
            tuple(place for place, later in enumerate(steps) if step.name in later.after),
            step.is_join,
        )
        for step in steps
    )
