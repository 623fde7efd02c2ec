"""What a NodeManager asks of whoever decides which manager leads.

A candidate waits in ``lead`` until it leads. It then has the state that the managers before it
stored, under an epoch that is higher than all of theirs, and the right to store new ones until
``wait_lost`` returns. What a coordinator promises:

* at most one manager can store at any time; one that has lost the leadership stores nothing more;
* ``store`` returns only when the state is durable: it survives the process and the machine's power;
* the next manager begins with the last state that was acknowledged, or a later one whose
  acknowledgement was under way.

Orders and routes carry the epoch, so that nodes ignore a manager that does not know yet that it no
longer leads.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from onepiece.core.manager import ManagerState


class Coordinator(ABC):
    """One candidate's view of who leads."""

    has_rivals: ClassVar[bool] = False
    """Whether another process may lead, or come to lead."""

    @property
    def leader(self) -> str | None:
        """The control address of the other candidate that was last seen to lead; None: none is known."""
        return None

    @abstractmethod
    async def lead(self) -> ManagerState:
        """Wait until this candidate leads.

        Returns:
            What is stored: what the managers before left, under this leadership's new epoch.

        Raises:
            ConfigError: What is stored cannot be used; the message says why.
            StoreFull: The new epoch could not be stored.
        """

    @abstractmethod
    async def store(self, state: ManagerState) -> None:
        """Make ``state`` durable; it replaces the one before. Its numbers never fall.

        If the caller is cancelled here, the state may have been stored or not.

        Raises:
            LeadershipLost: This manager does not lead; nothing was stored.
            StoreFull: What keeps the state took no more; what was stored before is intact.
        """

    @abstractmethod
    async def wait_lost(self) -> None:
        """Return when the leadership is lost; at once if there is none."""
