"""Which small rings are explored.

Every setting is run to its end: all interleavings, and every state checked. What grows the number of
states most is, in this order, wrong suspicions, crashes, messages and producers; so no setting has much
of everything, and together they have all of it.
"""

from typing import Final

from attrs import evolve

from simulations.ring_consumer import ModelConsumer
from simulations.ring_producer import ModelProducer
from simulations.ring_state import Setting

_ONE: Final = (1,)
_TWO: Final = (2,)

_PULLED: Final = (0,)


def _hashed(setting: Setting) -> Setting:
    """With the hashes, which must find what the order of the writes cannot exclude."""
    return evolve(setting, hashes=True, producer=ModelProducer, consumer=ModelConsumer)


QUICK: Final = (
    # Two producers, both modes, every fault.
    Setting((_ONE, _TWO), crashes=1, suspicions=1),
    Setting((_ONE, _TWO), crashes=1, suspicions=1, guarded=True),
    Setting(((1, 1), _TWO), slots=3, crashes=1),
    Setting((_ONE, _TWO), crashes=1, suspicions=1, guarded=True, near_wrap=True, deaths_noticed=True),
    Setting((_ONE, _TWO), crashes=1, torn_reads=True),
    Setting((_ONE, _TWO), crashes=1, torn_loads=True),
    Setting((_ONE, _TWO), cuts=1),
    _hashed(Setting((_ONE, _ONE), crashes=1, damages=1)),
    # Messages that do not fit behind one another, up to one that needs the whole payload ring.
    Setting(((1, 2), (2, 1)), crashes=1),
    Setting(((1, 2), (3,)), crashes=1),
    Setting(((2, 2), (2,)), slots=3, crashes=1, near_wrap=True),
    # Three producers.
    Setting((_ONE, _ONE, _TWO), crashes=1),
    Setting((_ONE, _ONE, _ONE), slots=3, granules=2, crashes=1, guarded=True),
    # Counters that wrap, and a snapshot from before the wrap.
    Setting((_ONE, (1, 1, 1, 1, 1)), granules=4, moduli=(4, 8)),
    # Claims, where the owner executes them: each of the above kinds once more.
    Setting((_ONE, _TWO), crashes=1, suspicions=1, claims=True),
    Setting(
        (_ONE, _TWO),
        crashes=1,
        suspicions=1,
        guarded=True,
        near_wrap=True,
        deaths_noticed=True,
        claims=True,
    ),
    Setting((_ONE, _TWO), cuts=1, claims=True),
    Setting(((1, 2), (2, 1)), crashes=1, claims=True),
    Setting((_ONE, _ONE, _TWO), crashes=1, claims=True),
    Setting((_ONE, (1, 1, 1, 1, 1)), granules=4, moduli=(4, 8), claims=True),
    Setting(((0, 1), _TWO), crashes=1, guarded=True, near_wrap=True, claims=True),
    Setting((_ONE, _ONE), granules=4, crashes=1, apart=True, claims=True),
    _hashed(Setting((_ONE, _ONE), suspicions=1, retires=True, claims=True)),
    # Messages that are pulled: with every fault, and by the order of steps alone.
    Setting((_PULLED, _PULLED), crashes=1),
    Setting((_PULLED, _ONE), suspicions=1),
    Setting(((0, 0),), crashes=1, cuts=1, deaths_noticed=True),
    Setting(((0, 0),), cuts=1, places=2, held_pulled=2),
    Setting(((0, 0), _ONE), checks_generation=False),
    Setting(((0, 1), _TWO), crashes=1, guarded=True, near_wrap=True),
    _hashed(Setting((_PULLED,), crashes=1, damages=2)),
    # The payload ring in another memory, without hashes: what holds it together are the seals.
    Setting((_ONE, _ONE), granules=4, crashes=1, apart=True),
    Setting(((1, 1),), granules=4, crashes=1, suspicions=1, apart=True),
    Setting(((1, 1),), granules=4, cuts=1, near_wrap=True, apart=True),
    Setting(((1, 2),), crashes=1, suspicions=1, apart=True),
    # Sessions that cannot be revoked: their region is retired.
    _hashed(Setting((_ONE, _ONE), suspicions=1, retires=True)),
    _hashed(Setting(((1, 1),), cuts=1, retires=True)),
    _hashed(Setting((_PULLED,), suspicions=1, cuts=1, retires=True)),
    # Both: what is sealed is taken over, by the order of the looks and copies alone.
    Setting(((1, 1),), granules=4, suspicions=1, retires=True, apart=True),
    Setting(((1, 1),), granules=4, cuts=1, near_wrap=True, retires=True, apart=True),
    Setting(((1, 2),), crashes=1, suspicions=1, deaths_noticed=True, retires=True, apart=True),
)

FULL: Final = (
    *QUICK,
    Setting((_ONE, _TWO), crashes=2, suspicions=1),
    Setting((_ONE, _ONE), suspicions=2),
    Setting(((1, 1), _TWO), crashes=1, suspicions=1),
    Setting(((1, 2), (2, 1)), suspicions=1, near_wrap=True),
    Setting(((1, 2), (2, 1)), slots=3, granules=4, crashes=1, deaths_noticed=True),
    Setting((_ONE, _TWO), crashes=1, cuts=1, deaths_noticed=True),
    Setting((_ONE, _ONE, _TWO), crashes=2),
    Setting((_ONE, _ONE, _TWO), suspicions=1, guarded=True),
    Setting((_ONE, _ONE, _TWO), slots=3, suspicions=1),
    Setting((_ONE, _ONE, _TWO), slots=3, crashes=1, deaths_noticed=True),
    Setting((_ONE, (1, 1, 1, 1, 1)), granules=4, crashes=1, moduli=(4, 8)),
    Setting((_ONE, (1, 1, 1, 1, 1)), granules=4, crashes=1, moduli=(4, 8), claims=True),
    Setting((_ONE, _ONE, _TWO), suspicions=1, guarded=True, claims=True),
    Setting(((1, 1), _TWO), crashes=1, suspicions=1, claims=True),
    _hashed(Setting((_ONE, _ONE), suspicions=1, damages=1)),
    Setting((_PULLED, _ONE), crashes=1, suspicions=1),
    Setting(((0, 0), _ONE), crashes=1),
    Setting(((0, 0), (0,)), suspicions=1),
    Setting((_PULLED, _ONE), crashes=1, cuts=1, deaths_noticed=True),
    Setting((_ONE, _ONE), granules=4, crashes=1, suspicions=1, apart=True),
    Setting(((1, 1), _ONE), granules=4, crashes=1, apart=True),
    Setting(((1, 1, 1),), granules=4, cuts=1, near_wrap=True, apart=True),
    _hashed(Setting((_ONE, _ONE), crashes=1, retires=True, deaths_noticed=True)),
    _hashed(Setting((_ONE, _TWO), suspicions=1, retires=True)),
    _hashed(Setting((_PULLED, _ONE), suspicions=1, retires=True)),
    Setting((_ONE, _ONE), granules=4, suspicions=1, retires=True, apart=True),
    Setting((_ONE, _ONE), granules=4, cuts=1, near_wrap=True, retires=True, apart=True),
)
