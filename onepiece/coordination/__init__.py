"""Who leads, and what outlives the one who leads.

``interface`` says what any coordinator promises; ``embedded`` is the default: one manager, whose
state lies in a small file of its node; ``etcd`` lets several candidates agree (imported where it is used,
since it needs an HTTP client); ``choice`` reads which of them is meant.
"""

from onepiece.coordination.choice import EMBEDDED, Coordination, parse_coordination
from onepiece.coordination.embedded import open_embedded
from onepiece.coordination.interface import Coordinator

__all__ = ["EMBEDDED", "Coordination", "Coordinator", "open_embedded", "parse_coordination"]
