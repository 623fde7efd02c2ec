"""The metrics of one node: which of its parts are read, and by what."""

from collections.abc import Callable, Iterable

from onepiece.graph import INPUTS
from onepiece.metrics import Metrics, Sample
from onepiece.node.actor_host import ActorHost
from onepiece.node.member import Member
from onepiece.node.node_manager import ManagerService
from onepiece.node.node_stores import Stores
from onepiece.node.proxy import ProxyApp
from onepiece.node.proxy_service import ProxyService
from onepiece.node.readings import actors, channels, delivery, identity, manager, proxy, stores
from onepiece.node.replica_service import ReplicaService
from onepiece.runtime.environment import Environment


class NodeMetrics:
    """Connects ``Metrics`` with the parts of a node, as they come into being."""

    def __init__(self, env: Environment) -> None:
        self.shown = Metrics()
        self._env = env
        self._host: ActorHost | None = None
        self._is_proxy = False

    def of_proxy(self, service: ProxyService, app: ProxyApp) -> None:
        """Show a proxy, too."""
        self._is_proxy = True
        self._read("proxy", lambda: (*proxy.requests(service), *proxy.http(app)))

    def of_manager(self, service: ManagerService) -> None:
        """Show a manager, too."""
        self._read("manager", lambda: manager.manager(service))

    def of_node(
        self, member: Member, host: ActorHost | None, kept: Stores, copies: ReplicaService | None
    ) -> None:
        """Show what every node has, and what a worker and a store node have beside that."""
        env, self._host = self._env, host
        self._read("node", lambda: identity.identity(env, member))
        self._read("channels", lambda: (*channels.inboxes(env, self._inboxes()), *channels.links(env)))
        self._read("delivery", self._delivery)
        if host is not None:
            known = member.info.devices
            self._read("actors", lambda: (*actors.devices(env, host, known), *actors.actors(env, host)))
        if copies is not None:
            self._read("copies", lambda: stores.copies(copies))
        if kept != Stores():
            self.shown.read_from("stores", lambda: stores.stores(kept))

    def _delivery(self) -> Iterable[Sample]:
        begin = set(self._inboxes().values()) | ({INPUTS} if self._is_proxy else set())
        yield from delivery.edges(self._env, begin)
        yield from delivery.retained(self._env, begin)
        yield from delivery.resent(self._env, begin)

    def _inboxes(self) -> dict[str, str]:
        """The stage of each actor's inbox, by its name."""
        if self._host is None:
            return {}
        return {f"actor/{report.actor_id}": report.stage for report, _ in self._host.loads()}

    def _read(self, part: str, look: Callable[[], Iterable[Sample]]) -> None:
        async def source() -> Iterable[Sample]:
            return look()

        self.shown.read_from(part, source)
