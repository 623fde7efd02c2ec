"""Service times: what was measured of a stage, and the rate of one instance that follows.

A *timing* is a mean and a spread (the standard deviation) of the seconds that one batch takes, for one
*size class* (requests of one resolution and length, "480p" for instance), one number of requests in the
batch, and one number of devices. What this promises:

* Nothing is made up. Between two measured batch sizes the mean and the spread are interpolated linearly;
  beyond the largest measured one no batch is formed, and a size class or a number of devices that was not
  measured is an error that names those that were.
* An instance is worth what its best batch gives: ``requests_per_second`` is the largest
  ``batch / mean`` times ``concurrency``. Since the mean is linear in between, the best batch is a measured
  one or the largest that is allowed.

**Individual Mode**: each of an instance's ``concurrency`` workers takes one batch at a time, on one device.
**Collaboration Mode**: all ``devices`` work on one batch together, and its seconds are those of the group.
"""

import enum
from functools import cached_property
from typing import Final

from attrs import evolve, field, frozen, validators

from onepiece.core.inventory import DeviceKind
from onepiece.errors import ConfigError

ANY_SIZE: Final = ""
"""The size class where requests are not told apart."""


class Mode(enum.StrEnum):
    """How the devices of one instance share the work."""

    INDIVIDUAL = "individual"
    COLLABORATION = "collaboration"


@frozen
class Timing:
    """How long one batch took, in seconds: the mean and the standard deviation of ``samples`` runs."""

    mean_seconds: float = field(validator=validators.gt(0))
    spread_seconds: float = field(default=0.0, validator=validators.ge(0))
    size_class: str = ANY_SIZE
    batch: int = field(default=1, validator=validators.ge(1))
    devices: int = field(default=1, validator=validators.ge(1))
    samples: int = field(default=1, validator=validators.ge(1))

    @property
    def request_seconds(self) -> float:
        """Seconds of a worker for each request of the batch."""
        return self.mean_seconds / self.batch


@frozen
class StageProfile:
    """What was measured of a stage, and how its instances are set up.

    ``memory_bytes`` is what one instance takes on each of its devices, ``load_seconds`` what it takes
    until a new one is ready, ``output_bytes`` what it sends on for one request.
    """

    stage: str
    timings: tuple[Timing, ...] = field()
    kind: DeviceKind = DeviceKind.GPU
    devices: int = field(default=1, validator=validators.ge(1))
    concurrency: int = field(default=1, validator=validators.ge(1))
    batch_max: int = field(default=1, validator=validators.ge(1))
    memory_bytes: int = field(default=0, validator=validators.ge(0))
    load_seconds: float = field(default=0.0, validator=validators.ge(0))
    output_bytes: int = field(default=0, validator=validators.ge(0))

    @timings.validator
    def _are_told_apart(self, _attribute: object, timings: tuple[Timing, ...]) -> None:
        keys = [(timing.size_class, timing.batch, timing.devices) for timing in timings]
        if not keys:
            raise ConfigError(f"stage {self.stage} has no timing; profile its workflow", stage=self.stage)
        if len(set(keys)) < len(keys):
            raise ConfigError(
                f"stage {self.stage} has two timings of one size class, batch and number of devices; "
                "keep one of them",
                stage=self.stage,
            )

    def __attrs_post_init__(self) -> None:
        if self.mode is Mode.COLLABORATION and self.concurrency > 1:
            raise ConfigError(
                f"stage {self.stage} has {self.devices} devices that work on one request and a concurrency "
                f"of {self.concurrency}; in Collaboration Mode it is 1",
                stage=self.stage,
            )

    @property
    def mode(self) -> Mode:
        """Individual Mode on one device, Collaboration Mode on several."""
        return Mode.COLLABORATION if self.devices > 1 else Mode.INDIVIDUAL

    def on(self, devices: int) -> "StageProfile":
        """The same stage with this many devices for each instance."""
        return evolve(self, devices=devices)

    def timing(self, size_class: str, batch: int = 1) -> Timing:
        """The seconds of a batch of this size, measured or between two that were.

        Raises:
            ConfigError: Nothing was measured for this size class, or only smaller (or larger) batches.
        """
        known = self._measured(size_class)
        above = next((timing for timing in known if timing.batch >= batch), None)
        if above is None or known[0].batch > batch:
            raise ConfigError(
                f"stage {self.stage} was measured in batches of {known[0].batch} to {known[-1].batch} "
                f"requests, not of {batch}; profile it with that batch size",
                stage=self.stage,
            )
        if above.batch == batch:
            return above
        below = next(timing for timing in reversed(known) if timing.batch < batch)
        share = (batch - below.batch) / (above.batch - below.batch)
        return evolve(
            above,
            batch=batch,
            mean_seconds=below.mean_seconds + share * (above.mean_seconds - below.mean_seconds),
            spread_seconds=below.spread_seconds + share * (above.spread_seconds - below.spread_seconds),
            samples=min(below.samples, above.samples),
        )

    def batch_limit(self, size_class: str) -> int:
        """The largest batch that is formed: of those that are allowed and were measured."""
        return min(self.batch_max, self._measured(size_class)[-1].batch)

    def best(self, size_class: str) -> Timing:
        """The batch with the fewest seconds for each request; the smallest of those that are equal."""
        self._measured(size_class)
        return self._best_by_class[size_class]

    def _best(self, size_class: str) -> Timing:
        limit = self.batch_limit(size_class)
        measured = {timing.batch for timing in self._measured(size_class) if timing.batch <= limit}
        candidates = (self.timing(size_class, batch) for batch in sorted(measured | {limit}))
        return min(candidates, key=lambda timing: timing.request_seconds)

    def requests_per_second(self, size_class: str) -> float:
        """What one instance serves at most."""
        return self.concurrency / self.best(size_class).request_seconds

    @cached_property
    def size_classes(self) -> tuple[str, ...]:
        """Those that were measured with this number of devices."""
        return tuple(sorted({t.size_class for t in self.timings if t.devices == self.devices}))

    def _measured(self, size_class: str) -> tuple[Timing, ...]:
        found = self._by_class.get(size_class)
        if found is not None:
            return found
        counts = sorted({timing.devices for timing in self.timings})
        if self.devices not in counts:
            raise ConfigError(
                f"stage {self.stage} was measured on {' or '.join(map(str, counts))} devices, not on "
                f"{self.devices}; profile it so",
                stage=self.stage,
            )
        classes = ", ".join(map(repr, self.size_classes))
        raise ConfigError(
            f"stage {self.stage} has no timing for the size class {size_class!r}, only for {classes}; "
            "profile the workflow with inputs of that class",
            stage=self.stage,
            size_class=size_class,
        )

    @cached_property
    def _best_by_class(self) -> dict[str, Timing]:
        return {size_class: self._best(size_class) for size_class in self._by_class}

    @cached_property
    def _by_class(self) -> dict[str, tuple[Timing, ...]]:
        found: dict[str, list[Timing]] = {}
        for timing in sorted(self.timings, key=lambda timing: timing.batch):
            if timing.devices == self.devices:
                found.setdefault(timing.size_class, []).append(timing)
        return {size_class: tuple(timings) for size_class, timings in found.items()}
