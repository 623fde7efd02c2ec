"""Every bound of the definition layer and of the wire, and how they depend on each other.

Sizes from the wire are compared with these before anything is allocated for them. Tensors have no
bound of their own: the ring and the store refuse what they cannot hold, each with its own error.
"""

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

# Definitions: what one workflow may be made of.
STAGES_PER_WORKFLOW_MAX: Final = 64
PARAMETERS_MAX: Final = 64
NAME_CHARACTERS_MAX: Final = 128
CONSTANT_BYTES_MAX: Final = 16 * KIB
INSTANCES_MAX: Final = 1024
CONCURRENCY_MAX: Final = 1024
TIMEOUT_SECONDS_MAX: Final = 7 * 24 * 3600.0

# Inputs: what a client may send in one field.
TEXT_INPUT_BYTES_MAX: Final = 64 * KIB
BYTES_INPUT_BYTES_MAX: Final = 64 * MIB
ITEMS_INPUT_MAX: Final = 4096

# Values: the tree around the tensors of one message.
TREE_DEPTH_MAX: Final = 16
TREE_NODES_MAX: Final = 16 * KIB
BUFFERS_MAX: Final = 1024
TENSOR_DIMENSIONS_MAX: Final = 32
TENSOR_ELEMENTS_MAX: Final = (1 << 63) - 1
INLINE_BYTES_MAX: Final = 1 * KIB
"""Longer texts and bytes travel as buffers beside the header, not in it."""
INTEGER_MIN: Final = -(1 << 63)
INTEGER_MAX: Final = (1 << 64) - 1

# The wire.
ALIGNMENT_BYTES: Final = 64
HEADER_BYTES_MAX: Final = 256 * KIB
CONTROL_BYTES_MAX: Final = 1 * MIB
CBOR_DEPTH_MAX: Final = 3 * TREE_DEPTH_MAX + 8
"""A level of a value takes up to three of CBOR (tag, array, map); eight are for what is around it."""

assert INLINE_BYTES_MAX < CONSTANT_BYTES_MAX
assert CONSTANT_BYTES_MAX < TEXT_INPUT_BYTES_MAX
assert TEXT_INPUT_BYTES_MAX < HEADER_BYTES_MAX
assert HEADER_BYTES_MAX < CONTROL_BYTES_MAX
assert TEXT_INPUT_BYTES_MAX < BYTES_INPUT_BYTES_MAX
assert ITEMS_INPUT_MAX < TREE_NODES_MAX
assert TREE_NODES_MAX < HEADER_BYTES_MAX  # a node takes a byte at least
assert BUFFERS_MAX < TREE_NODES_MAX
assert PARAMETERS_MAX < TREE_NODES_MAX
assert ALIGNMENT_BYTES & (ALIGNMENT_BYTES - 1) == 0
assert STAGES_PER_WORKFLOW_MAX * CONSTANT_BYTES_MAX <= CONTROL_BYTES_MAX

# Messages that no inbox's ring holds: their receiver pulls them from their sender.
PULLED_BYTES_MAX: Final = 2 * GIB
"""Memory of one inbox for such messages: what it holds at a time, and so the longest of them."""
EXPORTED_BYTES_MAX: Final = 2 * GIB
"""What one link lends to its peer until the peer has pulled it; further messages wait."""

INBOX_HEAD_BYTES: Final = 8 * KIB
"""Host memory beside each slot of an inbox in a device's memory; longer heads lie there with the payload."""
OCCUPIED_COLLECT_SECONDS: Final = 1.0
"""How soon the garbage collector is called where its stage has nothing in hand and messages stay there."""
OCCUPIED_IDLE_SECONDS: Final = 10.0
"""How often such an inbox looks whether its stage, which has nothing in hand, keeps messages there."""

assert HEADER_BYTES_MAX + BYTES_INPUT_BYTES_MAX < PULLED_BYTES_MAX <= EXPORTED_BYTES_MAX

# Errors and reports, whatever a stage puts into them: well below what a message or a store takes.
ERROR_SHOWN_BYTES_MAX: Final = 1 * KIB
"""A value that is shown as ``repr`` does, a name."""
ERROR_CAUSE_BYTES_MAX: Final = 4 * KIB
"""What an exception of any kind says, and the end of its traceback."""
ERROR_TEXT_BYTES_MAX: Final = 16 * KIB
"""An error's message, or one text among its fields."""
ERROR_FIELDS_BYTES_MAX: Final = 32 * KIB
"""All fields, names included; the last one may go beyond it by a name and a shown value."""
ERROR_BYTES_MAX: Final = ERROR_TEXT_BYTES_MAX + ERROR_FIELDS_BYTES_MAX + 4 * ERROR_SHOWN_BYTES_MAX
LOG_TEXT_BYTES_MAX: Final = 64 * KIB
"""One field of a logged event."""
REPORT_BYTES_MAX: Final = 64 * KIB
"""The fields of one ``ctx.report``; a preview has a bound of its own."""

assert ERROR_SHOWN_BYTES_MAX < ERROR_CAUSE_BYTES_MAX < ERROR_TEXT_BYTES_MAX < ERROR_FIELDS_BYTES_MAX
assert 2 * ERROR_BYTES_MAX < HEADER_BYTES_MAX
assert 4 * REPORT_BYTES_MAX <= HEADER_BYTES_MAX

# The runtime: queues and patience.
CONTROL_QUEUE_MAX: Final = 16 * KIB
"""Control messages that wait for one peer; a peer that takes none for so long is nearly dead."""
CONTROL_BATCH_BYTES_MAX: Final = 64 * KIB
"""Control messages are joined to one ring message until it has this size."""
RESULT_PIECE_BYTES_MAX: Final = 512 * KIB
PREVIEW_BYTES_MAX: Final = 256 * KIB
STOPPED_UIDS_MAX: Final = 16 * KIB
"""Requests an actor remembers as stopped, so that what arrives late for them is refused."""
WORKFLOW_PATIENCE_SECONDS: Final = 10.0
REPORT_LINGER_SECONDS: Final = 0.1
"""How long a stage's report waits for company, and for a newer one that makes it needless.

Nobody but a person waits for a report; what a request waits for never lingers."""
REPORTS_QUEUED_MAX: Final = 4 * KIB
"""Reports that linger for one owner; more of them do not wait any longer."""
CONSUMED_PER_MESSAGE_MAX: Final = 256
"""Outputs that one message lets go of."""
DELIVERY_PATIENCE_SECONDS: Final = 30.0
REPORT_HEARD_SECONDS: Final = 1.0
"""How long a stage that may have killed nodes is held back until its request's owner knows that it begins."""
LOSSES_PER_MESSAGE_MAX: Final = 8
"""Nodes that may die with a message in their ring that nobody saw them take: it may be what kills them."""
ACTORS_PICKED_MAX: Final = 64 * KIB
"""Actors of which a node remembers when it picked them last."""
EVENTS_PER_REQUEST_MAX: Final = 512
EVENTS_BYTES_PER_REQUEST_MAX: Final = 4 * MIB
RECORDS_MAX: Final = 10_000
RECORDS_BYTES_MAX: Final = 64 * MIB
"""What a proxy keeps of ended requests takes this much memory at most, as estimated."""
RECORD_KEEP_SECONDS: Final = 3600.0
STORES_RETURN_SECONDS: Final = 5.0
"""How long behind its first route table a node takes into account that store nodes may still join."""
STORES_FORGOTTEN_SECONDS: Final = 600.0
"""How long a store node that is gone is expected back, with what lies on its disk."""
KEY_CLAIMS_MAX: Final = 16 * KIB
"""Keys that a store node has promised to requests whose records it does not have yet."""
KEY_CLAIM_SECONDS: Final = 30.0
"""How long such a promise stands, unless the record comes, or its proxy lets go of it or dies."""
CHECKPOINT_LINGER_SECONDS: Final = 60.0
"""How long behind its request's deadline a checkpoint is kept that nobody has released."""
FOLLOWERS_PER_REQUEST_MAX: Final = 64
"""Clients that follow one request's events at once."""

# Admission: who may submit what, and how many of them are told apart.
TENANT_CHARACTERS_MAX: Final = 128
SIZE_CLASS_CHARACTERS_MAX: Final = 64
SIZE_CLASSES_MAX: Final = 64
REPORTED_CLASSES_MAX: Final = 16
PREFETCH_SECONDS_MAX: Final = 300.0
"""Size classes of one stage whose times are told apart; the others share one."""
FLOWS_MAX: Final = 1024
"""Workflows, tenants of one, and so on, that the door tells apart; the others share one."""
PRIORITY_MAX: Final = 2
"""Priorities go from minus this to plus this."""
OTHER_SETS_MAX: Final = 16
WEIGHT_MIN: Final = 0.01
WEIGHT_MAX: Final = 100.0

# Stages in a helper process.
ISOLATED_PACKET_BYTES_MAX: Final = 128 * KIB
"""Larger messages lie in shared memory of their own, and only its descriptor is sent."""
ISOLATED_MESSAGE_BYTES_MAX: Final = 16 * GIB
ISOLATED_PROGRESS_SECONDS: Final = 0.02
"""Between two reports of one call's progress; newer ones replace what waits."""
ISOLATED_STOP_SECONDS: Final = 30.0
"""How long a call that was cancelled may go on, a step on a GPU for instance, before its process is ended."""
ISOLATED_LEAVE_SECONDS: Final = 2.0
"""The same when the actor itself has to end at once."""
ISOLATED_UNLOAD_SECONDS: Final = 10.0
ISOLATED_TERMINATE_SECONDS: Final = 2.0
"""From SIGTERM to SIGKILL."""
ISOLATED_KILL_SECONDS: Final = 10.0
"""From SIGKILL to giving the process up: it hangs in the kernel."""
ISOLATED_STARTS_MAX: Final = 3
"""Crashes in a row, while loading or before any work, after which the actor has failed."""
ISOLATED_PAUSE_SECONDS: Final = 0.2
"""Before a process that crashed while loading is started again; doubled each time."""
ISOLATED_REFUSE_SECONDS: Final = 1.0
"""From one rank's refusal of a request to that of the last; if one of them does not, all are ended."""
LOADS_AT_ONCE: Final = 1
"""Ranks of one node that are in their setups at the same time, each with the whole weights in memory, say."""

assert ISOLATED_PACKET_BYTES_MAX < PREVIEW_BYTES_MAX < ISOLATED_MESSAGE_BYTES_MAX
assert ISOLATED_LEAVE_SECONDS < ISOLATED_STOP_SECONDS

assert CONTROL_BATCH_BYTES_MAX < CONTROL_BYTES_MAX
assert RESULT_PIECE_BYTES_MAX < CONTROL_BYTES_MAX
assert WORKFLOW_PATIENCE_SECONDS < DELIVERY_PATIENCE_SECONDS
assert PREVIEW_BYTES_MAX < EVENTS_BYTES_PER_REQUEST_MAX < RECORDS_BYTES_MAX
assert EVENTS_PER_REQUEST_MAX > 8 * STAGES_PER_WORKFLOW_MAX - 1
