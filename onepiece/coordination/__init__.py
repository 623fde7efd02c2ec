"""Who leads, and what outlives the one who leads.

``interface`` says what any coordinator promises; ``embedded`` is the default: one manager, whose
state lies in a small file of its node.
"""

from onepiece.coordination.embedded import open_embedded
from onepiece.coordination.interface import Coordinator

__all__ = ["Coordinator", "open_embedded"]
