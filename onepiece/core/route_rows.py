"""The rows of a route table, made from what the manager knows of nodes, actors and workflows.

What they promise: a row says nothing that its member, actor or workflow does not say, and holds no moment.
Equal states give equal rows, so that a table that is made anew differs from the last one only if something
has changed, and only then is published.
"""

from onepiece.core.actors import Actor
from onepiece.core.inventory import RegisteredWorkflow
from onepiece.core.membership import Member
from onepiece.core.routing import ActorRoute, NodeRoute, WorkflowRoute


def node_route(member: Member) -> NodeRoute:
    """A node that is not dead."""
    node = member.node
    return NodeRoute(
        node_id=node.node_id,
        incarnation=node.incarnation,
        address=node.address,
        http=node.http,
        roles=node.roles,
        state=member.state.value,
        devices=node.devices,
        process_id=node.process_id,
    )


def actor_route(actor: Actor) -> ActorRoute:
    """An actor, whatever its state."""
    return ActorRoute(
        actor_id=actor.actor_id,
        stage=actor.stage,
        node_id=actor.node_id,
        incarnation=actor.incarnation,
        devices=actor.devices,
        address=actor.address,
        state=actor.shown_state,
        error=actor.error,
    )


def workflow_route(workflow: RegisteredWorkflow) -> WorkflowRoute:
    """A registered workflow."""
    stages = tuple(need.stage for need in workflow.stages)
    return WorkflowRoute(workflow.name, workflow.module, workflow.digest, stages)
