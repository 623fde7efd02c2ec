"""Decisions without I/O: the machines and tables that drivers elsewhere carry out.

Nothing here reads a clock, draws randomness, opens, logs or awaits anything; ``machine`` says what a
machine is, and each module opens with what it promises.

============== ==================================================================================
module         decides
============== ==================================================================================
membership     which nodes belong to the set
packing        on which devices new instances go (a pure function)
actors         the life of one stage actor
placement      which actors there should be
routing        which actor a message goes to
manager        all of the above as the leading NodeManager
admission      whether a request gets a place
request        what has become of a request
replication    which store nodes hold copies of results, and how these become alike
============== ==================================================================================
"""

from onepiece.core.actors import Actor, ActorLife, Assign, Unassign
from onepiece.core.admission import BudgetLimits, RequestBudget
from onepiece.core.inventory import (
    ActorReport,
    ActorState,
    Device,
    DeviceKind,
    NodeInfo,
    RegisteredWorkflow,
    StageNeed,
)
from onepiece.core.machine import InvalidTransition, Machine, Story
from onepiece.core.manager import (
    ConfirmWorkflow,
    ManagerConfig,
    ManagerEffect,
    ManagerEvent,
    ManagerMachine,
    ManagerState,
    PublishRoutes,
    RefuseWorkflow,
    SendRoutes,
    StoreState,
    WorkflowOffered,
    WorkflowWithdrawn,
)
from onepiece.core.membership import (
    Expel,
    HeartbeatReceived,
    ManagerStalled,
    Member,
    MembershipConfig,
    MembershipMachine,
    NodeDied,
    NodeDrained,
    NodeEmptied,
    NodeJoined,
    NodeLeft,
    NodeRecovered,
    NodeResumed,
    NodeState,
    NodeSuspected,
    Tick,
)
from onepiece.core.packing import desired_instances
from onepiece.core.placement import PlacementMachine
from onepiece.core.placement_events import (
    ActorFailed,
    DemandChanged,
    PlacementConfig,
    SendAssign,
    SendUnassign,
)
from onepiece.core.retries import RetryPolicy
from onepiece.core.routing import (
    ActorRoute,
    NodeRoute,
    Problem,
    RouteChanges,
    RouteEpoch,
    RouteTable,
    WorkflowRoute,
    diff,
    rendezvous,
)

__all__ = [
    "Actor",
    "ActorFailed",
    "ActorLife",
    "ActorReport",
    "ActorRoute",
    "ActorState",
    "Assign",
    "BudgetLimits",
    "ConfirmWorkflow",
    "DemandChanged",
    "Device",
    "DeviceKind",
    "Expel",
    "HeartbeatReceived",
    "InvalidTransition",
    "Machine",
    "ManagerConfig",
    "ManagerEffect",
    "ManagerEvent",
    "ManagerMachine",
    "ManagerStalled",
    "ManagerState",
    "Member",
    "MembershipConfig",
    "MembershipMachine",
    "NodeDied",
    "NodeDrained",
    "NodeEmptied",
    "NodeInfo",
    "NodeJoined",
    "NodeLeft",
    "NodeRecovered",
    "NodeResumed",
    "NodeRoute",
    "NodeState",
    "NodeSuspected",
    "PlacementConfig",
    "PlacementMachine",
    "Problem",
    "PublishRoutes",
    "RefuseWorkflow",
    "RegisteredWorkflow",
    "RequestBudget",
    "RetryPolicy",
    "RouteChanges",
    "RouteEpoch",
    "RouteTable",
    "SendAssign",
    "SendRoutes",
    "SendUnassign",
    "StageNeed",
    "StoreState",
    "Story",
    "Tick",
    "Unassign",
    "WorkflowOffered",
    "WorkflowRoute",
    "WorkflowWithdrawn",
    "desired_instances",
    "diff",
    "rendezvous",
]
