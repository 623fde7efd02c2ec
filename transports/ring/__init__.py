"""The double ring: many producers, one consumer, one-sided operations only, no lock.

Pure programs (see ``transports.operations``): whoever drives them brings the memory and the clock.
"""

from transports.ring.claims import Claims
from transports.ring.consumer import Consumer, Delivery
from transports.ring.layout import LAYOUT_VERSION, Geometry
from transports.ring.producer import Producer
from transports.ring.sessions import SessionsExhausted

__all__ = ["LAYOUT_VERSION", "Claims", "Consumer", "Delivery", "Geometry", "Producer", "SessionsExhausted"]
