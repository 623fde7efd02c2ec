"""Decisions without I/O: the machines and tables that drivers elsewhere carry out.

Nothing here reads a clock, draws randomness, opens, logs or awaits anything; ``machine`` says what a
machine is, and each module opens with what it promises.

============== ==================================================================================
module         decides
============== ==================================================================================
service_times  what one instance of a stage is worth, by what was measured
capacity       how many requests a second instances serve, how many instances a rate needs
latency        how long requests take under a load
finish         when a request that comes now is likely to be done
planning       how many instances a rate needs, or what a number of GPUs bears
spans          random lengths of time: sums, the longest, quantiles
membership     which nodes belong to the set
packing        on which devices new instances go (a pure function)
stage_sizes    what instances take, as declared and as measured
actors         the life of one stage actor
placement      which actors there should be
moving_actors  the orders that carry out moves
prefetches     what nodes read before an instance moves there
move_book      what becomes of the moves under way
run_times      how long runs of stages take, by what actors report
balance        how busy stages are, by what nodes report, and so what moves
moves          which instances should change their stage under a load (a pure function)
idle_devices   which devices no actor uses (and what they are lent to)
give_back      which instances a load does not need (a pure function)
rebalance      when instances should change their stage, or go
routing        which actor a message goes to
manager        all of the above as the leading NodeManager
admission      whether a request gets a place
request        what has become of a request
replication    which store nodes hold copies of results, and how these become alike
============== ==================================================================================
"""

from onepiece.core.actors import Actor, ActorLife, Assign, Unassign
from onepiece.core.admission import BudgetLimits, RequestBudget
from onepiece.core.capacity import CapacityModel, Demand, Step, WorkflowShape, matching_instances
from onepiece.core.finish import FinishModel
from onepiece.core.inventory import (
    ActorReport,
    ActorState,
    Device,
    DeviceKind,
    NodeInfo,
    RegisteredWorkflow,
    StageNeed,
)
from onepiece.core.latency import Latency, predict
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
from onepiece.core.service_times import ANY_SIZE, Mode, StageProfile, Timing

__all__ = [
    "ANY_SIZE",
    "Actor",
    "ActorFailed",
    "ActorLife",
    "ActorReport",
    "ActorRoute",
    "ActorState",
    "Assign",
    "BudgetLimits",
    "CapacityModel",
    "ConfirmWorkflow",
    "Demand",
    "DemandChanged",
    "Device",
    "DeviceKind",
    "Expel",
    "FinishModel",
    "HeartbeatReceived",
    "InvalidTransition",
    "Latency",
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
    "Mode",
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
    "StageProfile",
    "Step",
    "StoreState",
    "Story",
    "Tick",
    "Timing",
    "Unassign",
    "WorkflowOffered",
    "WorkflowRoute",
    "WorkflowShape",
    "WorkflowWithdrawn",
    "desired_instances",
    "diff",
    "matching_instances",
    "predict",
    "rendezvous",
]
