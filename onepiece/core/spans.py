"""Spans: random lengths of time that are added, and the longest of several, by their first two moments.

What a request's time in a workflow is made of. A span keeps its mean, the variance of each thing that it
depends on (by name, so that two branches behind one stage know what they have in common), and a *floor*, the
length that it is never below: what is above the floor is taken for a gamma distribution of that mean
and variance, from which the quantiles follow. For the sum of exponential lengths, and for constant ones,
that is exact; for the rest it is an approximation.

The longest of two spans is that of two normal distributions with that correlation, by C. E. Clark, "The
greatest of a finite set of random variables", Operations Research 9 (1961); its dependences are those of
the two, weighted by how likely each is the longer one, as in statistical timing analysis of circuits. The
mean is never below that of either.
"""

import math
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Final

from attrs import field, frozen

_BISECTIONS: Final = 60
_TERMS_MAX: Final = 10_000
_LARGE_SHAPE: Final = 1_000.0
"""Beyond it E. B. Wilson's and M. M. Hilferty's cube root (1931) is exact to what matters here."""


@frozen
class Span:
    """A random length of time, in seconds."""

    mean: float = 0.0
    floor: float = 0.0
    weights: Mapping[str, float] = field(factory=dict)
    """By what it depends on: the deviation, in seconds, that comes from there."""

    @classmethod
    def of(cls, source: str, mean: float, variance: float, floor: float) -> "Span":
        """What depends on ``source`` alone."""
        return cls(mean, min(floor, mean), {source: math.sqrt(variance)} if variance > 0 else {})

    @property
    def variance(self) -> float:
        """In square seconds."""
        return sum(weight * weight for weight in self.weights.values())

    def __add__(self, other: "Span") -> "Span":
        names = self.weights.keys() | other.weights.keys()
        weights = {name: self.weights.get(name, 0.0) + other.weights.get(name, 0.0) for name in names}
        return Span(self.mean + other.mean, self.floor + other.floor, weights)

    def quantile(self, share: float) -> float:
        """The length that ``share`` of all (0 < share < 1) do not exceed; infinite if the mean is."""
        assert 0 < share < 1
        above, variance = self.mean - self.floor, self.variance
        if math.isinf(self.mean):
            return math.inf
        if above <= 0 or variance <= 0:
            return self.mean
        return self.floor + _gamma_quantile(above * above / variance, share) * variance / above


def longest(spans: Iterable[Span], source: str) -> Span:
    """The longest of several, of none no time; ``source`` names what it depends on beyond what they do."""
    several = list(spans)
    return reduce(lambda one, other: _longer(one, other, source), several) if several else Span()


def _longer(one: Span, other: Span, source: str) -> Span:
    if math.isinf(one.mean) or math.isinf(other.mean):
        return Span(math.inf)
    floor = max(one.floor, other.floor)
    names = sorted(one.weights.keys() | other.weights.keys())
    pairs = {name: (one.weights.get(name, 0.0), other.weights.get(name, 0.0)) for name in names}
    distance = math.sqrt(sum((first - second) ** 2 for first, second in pairs.values()))
    if distance <= 1e-12 * max(one.mean, other.mean, 1e-300):
        chosen = one if one.mean >= other.mean else other
        return Span(chosen.mean, floor, chosen.weights)
    ahead = (one.mean - other.mean) / distance
    share, density = _normal_share(ahead), math.exp(-ahead * ahead / 2) / math.sqrt(2 * math.pi)
    mean = max(one.mean, other.mean, one.mean * share + other.mean * (1 - share) + distance * density)
    square = (
        (one.mean**2 + one.variance) * share
        + (other.mean**2 + other.variance) * (1 - share)
        + (one.mean + other.mean) * distance * density
    )
    weights = {name: first * share + second * (1 - share) for name, (first, second) in pairs.items()}
    rest = square - mean * mean - sum(weight * weight for weight in weights.values())
    if rest > 0:
        weights[source] = math.hypot(weights.get(source, 0.0), math.sqrt(rest))
    return Span(mean, min(floor, mean), weights)


def _normal_share(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2))


def _gamma_quantile(shape: float, share: float) -> float:
    """Of the gamma distribution with scale 1, by halving an interval that holds it."""
    if shape > _LARGE_SHAPE:
        return shape * (1 - 1 / (9 * shape) + _normal_quantile(share) / (3 * math.sqrt(shape))) ** 3
    low, high = 0.0, 1.0
    while _gamma_share(shape, high) < share:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _gamma_share(shape, middle) < share:
            low = middle
        else:
            high = middle
    return high


def _normal_quantile(share: float) -> float:
    low, high = -40.0, 40.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _normal_share(middle) < share:
            low = middle
        else:
            high = middle
    return high


def _gamma_share(shape: float, value: float) -> float:
    """The regularised lower incomplete gamma function, by its series."""
    if value <= 0:
        return 0.0
    term = total = math.exp(shape * math.log(value) - value - math.lgamma(shape + 1))
    for place in range(1, _TERMS_MAX):
        term *= value / (shape + place)
        total += term
        if term < 1e-15 * total:
            break
    return min(1.0, total)
