"""Who a node is, for whoever looks at its metrics."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from onepiece import metrics_catalogue as catalogue
from onepiece.metrics import Sample
from onepiece.node.member import Member
from onepiece.runtime.environment import Environment


def identity(env: Environment, member: Member) -> Iterator[Sample]:
    """The node itself, and whether it is one of the set."""
    info = member.info
    yield catalogue.NODE_INFO.of(1, info.node_id, info.address, ",".join(info.roles), _version())
    yield catalogue.NODE_INCARNATION.of(info.incarnation)
    route = env.routes.table.node(info.node_id)
    yield catalogue.NODE_IN_SET.of(route is not None and route.life == env.identity.life)
    yield catalogue.NODE_DRAINING.of(member.draining)


def _version() -> str:
    try:
        return version("onepiece")
    except PackageNotFoundError:  # it runs from a checkout
        return ""
