import math

import pytest

from onepiece.core.capacity import CapacityModel, Step, WorkflowShape
from onepiece.core.finish import FinishModel
from onepiece.errors import ConfigError
from tests.core.capacity_parts import make_line, make_stage

_LINE = FinishModel(make_line("w", make_stage("x", 4.0), make_stage("y", 12.0)))
_ONE = {"x": 1, "y": 3}


def test_alone_it_takes_its_stages_time() -> None:
    """Nobody is there: the sum of the means along the way."""
    assert _LINE.seconds("w", "", _ONE, {}) == 16


def test_a_queue_is_waited_for_once() -> None:
    """Behind the longest queue of its way the others are empty when it comes."""
    kind = ("w", "")
    assert _LINE.seconds("w", "", _ONE, {"x": {kind: 2}}) == 8 + 16
    assert _LINE.seconds("w", "", _ONE, {"y": {kind: 6}}) == 24 + 12
    assert _LINE.seconds("w", "", _ONE, {"x": {kind: 2}, "y": {kind: 3}}) == max(12, (2 + 3) * 4) + 12


def test_work_off_its_way_is_not_ahead() -> None:
    """What waits at a stage that only others visit comes later to the stage that both share."""
    stages = [make_stage(name, seconds) for name, seconds in (("a", 1.0), ("slow", 10.0), ("c", 1.0))]
    shapes = [WorkflowShape.line("quick", ["a", "c"]), WorkflowShape.line("long", ["a", "slow", "c"])]
    finish = FinishModel(CapacityModel.of(stages, shapes))
    instances = dict.fromkeys(("a", "slow", "c"), 1)
    present = {"slow": {("long", ""): 50}}
    assert finish.seconds("quick", "", instances, present) == 2
    assert finish.seconds("long", "", instances, present) == 500 + 10 + 1


def test_the_slower_branch_counts() -> None:
    """A join begins when the last branch has ended."""
    steps = (Step("s", "s"), Step("l", "l", ("s",)), Step("r", "r", ("s",)), Step("m", "m", ("l", "r"), True))
    stages = [make_stage(name, seconds) for name, seconds in (("s", 1), ("l", 2), ("r", 5), ("m", 1))]
    finish = FinishModel(CapacityModel.of(stages, [WorkflowShape("w", steps)]))
    instances = dict.fromkeys("slrm", 1)
    assert finish.seconds("w", "", instances, {}) == 7
    assert finish.seconds("w", "", instances, {"l": {("w", ""): 10}}) == 20 + 2 + 1


def test_without_an_instance_it_never_ends() -> None:
    """A stage that nobody serves makes it infinite; what the model does not know is an error."""
    assert math.isinf(_LINE.seconds("w", "", {"x": 1}, {}))
    with pytest.raises(ConfigError, match="'720p'"):
        _LINE.seconds("w", "720p", _ONE, {})
