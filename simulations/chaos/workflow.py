"""The synthetic diamond with two actors for each stage, so that each death leaves another one."""

from typing import Any, Final

from onepiece import stage, workflow
from stages import synthetic

INSTANCES: Final = 2

split = stage(instances=INSTANCES)(synthetic.split.function)
left = stage(instances=INSTANCES)(synthetic.left.function)
right = stage(instances=INSTANCES)(synthetic.right.function)
merge = stage(instances=INSTANCES)(synthetic.merge.function)


@workflow
def diamond(seconds: float, payload_bytes: int, seed: int) -> synthetic.Outcome:
    """Four stages with a join; every byte of every message follows from ``seed``."""
    parcel: Any = split(seconds, payload_bytes, 1, "sleep", seed, "none", "left", False)
    return merge(left(parcel), right(parcel))
