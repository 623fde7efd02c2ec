"""Every metric of a node: its name, labels and meaning. ``docs/reference/metrics.md`` is a picture of this.

Names say the unit last (``_seconds``, ``_bytes``), counters end in ``_total``, and a bound is called as what
it bounds, with ``_limit`` in it. Labels have few values: stages and workflows as they are registered, devices
of one node, names of errors. No label holds a UID, a tenant, a key or anything else that a client makes up.
"""

from typing import Final

from onepiece.metrics import Metric, MetricKind


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(f"onepiece_{name}", MetricKind.GAUGE, meaning, labels)


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(f"onepiece_{name}_total", MetricKind.COUNTER, meaning, labels)


def _histogram(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(f"onepiece_{name}", MetricKind.HISTOGRAM, meaning, labels)


# --- every node --------------------------------------------------------------------------------

NODE_INFO: Final = _gauge("node_info", "1, with what the node is", "node", "address", "roles", "version")
NODE_INCARNATION: Final = _gauge(
    "node_incarnation", "the node's incarnation; it grows when the node was declared dead and joins anew"
)
NODE_IN_SET: Final = _gauge("node_in_set", "1 if this life of the node is in the newest route table, else 0")
NODE_DRAINING: Final = _gauge("node_draining", "1 if the node takes no new work, else 0")

INBOX_BYTES: Final = _gauge("inbox_bytes", "bytes of the inbox's ring that are in use", "inbox", "stage")
INBOX_LIMIT_BYTES: Final = _gauge("inbox_limit_bytes", "bytes of the inbox's ring", "inbox", "stage")
INBOX_MESSAGES: Final = _gauge(
    "inbox_messages", "messages that were taken from the ring and still lie in it", "inbox", "stage"
)
INBOX_PULLED_BYTES: Final = _gauge(
    "inbox_pulled_bytes",
    "bytes of messages that were pulled, as the ring does not hold them",
    "inbox",
    "stage",
)
INBOX_PULLED_LIMIT_BYTES: Final = _gauge(
    "inbox_pulled_limit_bytes",
    "the most bytes of messages that were pulled that the inbox holds",
    "inbox",
    "stage",
)
SESSIONS_FENCED: Final = _counter(
    "sessions_fenced", "sessions of senders that this node's inboxes have fenced", "inbox", "reason"
)

LINKS: Final = _gauge("links", "open links to inboxes, by what carries their bytes", "transport", "wire")
LINKS_OPENING: Final = _gauge("links_opening", "links whose peer has not answered yet")
LINK_MESSAGES: Final = _gauge("link_messages", "messages that were sent and that no peer was seen to take")
LINK_LENT_BYTES: Final = _gauge("link_lent_bytes", "bytes that are lent to peers until they have pulled them")
CONTROL_QUEUED: Final = _gauge("control_messages_queued", "control messages and reports that wait to be sent")
CONTROL_LOST: Final = _counter("control_messages_lost", "control messages that were given up", "reason")

# --- delivery ----------------------------------------------------------------------------------

EDGE_LINKS: Final = _gauge(
    "edge_links",
    "open links from this node to actors of the next stage, by what carries their bytes",
    "stage",
    "next_stage",
    "transport",
    "wire",
)
RETAINED_BYTES: Final = _gauge(
    "retained_bytes", "outputs that are retained until the next stage is done", "stage", "next_stage", "place"
)
RETAINED_OUTPUTS: Final = _gauge(
    "retained_outputs", "how many outputs are retained", "stage", "next_stage", "place"
)
RETAINED_LIMIT_BYTES: Final = _gauge(
    "retained_limit_bytes", "what all stages of the node together may retain", "place"
)
SENDING_BYTES: Final = _gauge("sending_bytes", "outputs on their way, retained or not, and 4 KiB for each")
SENDING_LIMIT_BYTES: Final = _gauge(
    "sending_limit_bytes", "bytes of outputs on their way beyond which stages take no new work"
)
STAGES_HELD_BACK: Final = _gauge(
    "stages_held_back", "1 if the node's stages take no new work, as too much is retained or on its way"
)
OUTPUTS_RESENT: Final = _counter(
    "outputs_resent", "outputs that were sent again, by the stage that they go to", "next_stage", "reason"
)

# --- workers -----------------------------------------------------------------------------------

DEVICE_DECLARED_BYTES: Final = _gauge(
    "device_memory_declared_bytes", "what the stages on a device say that they need", "device"
)
DEVICE_LIMIT_BYTES: Final = _gauge("device_memory_limit_bytes", "the memory of a device", "device")
STAGE_ACTORS: Final = _gauge("stage_actors", "actors by their state", "stage", "device", "state")
STAGE_WORKERS: Final = _gauge("stage_workers", "how many stage tasks run at once", "stage", "device")
STAGE_RUNNING: Final = _gauge("stage_running", "stage tasks that run", "stage", "device")
STAGE_QUEUED: Final = _gauge("stage_queued", "stage tasks that wait for a worker", "stage", "device")
STAGE_OLDEST: Final = _gauge(
    "stage_oldest_wait_seconds",
    "how long the stage task that waits longest for a worker has waited",
    "stage",
    "device",
)
STAGE_JOINING: Final = _gauge("stage_joining", "stage tasks that wait for more inputs", "stage", "device")
STAGE_LEAVING: Final = _gauge("stage_leaving", "stage tasks whose outputs are being sent", "stage", "device")
JOIN_BYTES: Final = _gauge("join_bytes", "inputs that wait for their siblings", "stage", "device")
JOIN_LIMIT_BYTES: Final = _gauge(
    "join_limit_bytes",
    "bytes of inputs that wait for their siblings beyond which requests fail",
    "stage",
    "device",
)
STAGE_RUNS: Final = _counter("stage_runs", "runs that put something out", "stage", "device")
STAGE_BUSY: Final = _counter(
    "stage_busy_seconds",
    "how long workers have run stage tasks, those that run now included",
    "stage",
    "device",
)
STAGE_WASTED: Final = _counter(
    "stage_wasted_seconds",
    "how long workers have run stage tasks for nobody: that failed, were stopped, or came too late",
    "stage",
    "device",
    "error",
)
STAGE_DROPPED: Final = _counter(
    "stage_tasks_dropped",
    "stage tasks that came and were dropped before they ran",
    "stage",
    "device",
    "error",
)
STAGE_LOADS: Final = _counter("stage_loads", "how often the stage was loaded, also anew", "stage", "device")
STAGE_LOAD_SECONDS: Final = _gauge(
    "stage_load_seconds", "how long the stage's last load took", "stage", "device"
)

# --- proxies -----------------------------------------------------------------------------------

REQUESTS_ACCEPTED: Final = _counter("requests_accepted", "requests that were accepted here", "workflow")
REQUESTS_ADOPTED: Final = _counter(
    "requests_adopted", "requests that this proxy took over from one that died", "workflow"
)
REQUESTS_REFUSED: Final = _counter(
    "requests_refused", "submissions that were refused, and why", "workflow", "reason"
)
REQUESTS_FINISHED: Final = _counter("requests_finished", "requests that ended in a result", "workflow")
REQUESTS_FAILED: Final = _counter("requests_failed", "requests that ended in this error", "workflow", "error")
REQUESTS_CANCELLED: Final = _counter("requests_cancelled", "requests that were cancelled", "workflow")
REQUEST_SECONDS: Final = _histogram(
    "request_seconds", "from acceptance to result, of requests that finished", "workflow"
)
REQUEST_WASTED: Final = _counter(
    "request_wasted_seconds",
    "how long stages, on any node, had worked on requests that ended in this error",
    "workflow",
    "error",
)
REQUESTS_IN_FLIGHT: Final = _gauge(
    "requests_in_flight", "requests with a place: accepted, or about to be, and not ended", "workflow"
)
REQUESTS_IN_FLIGHT_LIMIT: Final = _gauge(
    "requests_in_flight_limit", "the most requests in flight, of all workflows together"
)
REQUESTS_ENDED_KEPT: Final = _gauge("requests_ended_kept", "ended requests that this proxy can tell about")
REQUESTS_ENDED_KEPT_LIMIT: Final = _gauge(
    "requests_ended_kept_limit", "the most ended requests that are kept"
)
REQUESTS_ENDED_BYTES: Final = _gauge("requests_ended_bytes", "what ended requests take in memory, about")
REQUESTS_ENDED_LIMIT_BYTES: Final = _gauge(
    "requests_ended_limit_bytes", "the most that ended requests may take"
)
ERRORS_UNSTORED: Final = _gauge(
    "request_errors_unstored", "errors that were told and that no store node has taken yet"
)
ADMISSION_SHARE: Final = _gauge("admission_share", "the part of the set that this proxy may fill")
ADMISSION_DEMAND: Final = _gauge(
    "admission_demand", "the part of the set that it was asked for lately; above 1 the set is full"
)
ADMISSION_WAIT: Final = _gauge(
    "admission_wait_seconds", "how long a request that comes now is predicted to wait", "workflow"
)
HTTP_IN_PROGRESS: Final = _gauge("http_requests_in_progress", "HTTP requests in progress, streams included")
HTTP_IN_PROGRESS_LIMIT: Final = _gauge(
    "http_requests_in_progress_limit", "the most HTTP requests in progress"
)
HTTP_REFUSED: Final = _counter("http_requests_refused", "HTTP requests beyond the limit, answered by 429")
HTTP_BODY_BYTES: Final = _gauge("http_body_bytes", "bodies that are read and results that are converted")
HTTP_BODY_LIMIT_BYTES: Final = _gauge(
    "http_body_limit_bytes", "the most that bodies and conversions may take"
)

# --- stores ------------------------------------------------------------------------------------

STORE_BYTES: Final = _gauge("store_bytes", "what the entries of a store on this node's disk take", "store")
STORE_LIMIT_BYTES: Final = _gauge("store_limit_bytes", "the byte budget of a store", "store")
STORE_FILE_BYTES: Final = _gauge("store_file_bytes", "what a store's file occupies on the disk", "store")
STORE_ENTRIES: Final = _gauge("store_entries", "the entries of a store by their kind", "store", "kind")
COPIES_PENDING: Final = _gauge("copies_pending", "copies that other store nodes are known to lack")
COPIES_SENT: Final = _counter("copies_sent", "copies that other store nodes have taken from here")
COPIES_FAILED: Final = _counter("copies_failed", "copies that could not be brought; they are tried again")
COPIES_TAKEN: Final = _counter("copies_taken", "copies that this store node took from others")

# --- managers ----------------------------------------------------------------------------------

MANAGER_LEADS: Final = _gauge("manager_leads", "1 if this manager leads, else 0")
SET_NODES: Final = _gauge("set_nodes", "nodes of the set by their state, as the leader sees them", "state")
SET_HEARD: Final = _gauge(
    "set_heartbeat_age_seconds", "how long ago the leader heard each living node", "node"
)
PLACEMENT_INSTANCES: Final = _gauge(
    "placement_instances", "instances of each stage: wanted, ready, loading, leaving", "stage", "state"
)
PLACEMENT_UTILISATION: Final = _gauge(
    "placement_utilisation",
    "the share of time that a stage's instances are busy, as moves are decided by",
    "stage",
)
PLACEMENT_PROBLEMS: Final = _gauge(
    "placement_problems", "1 if the stage cannot be placed as it should be, else 0", "stage"
)
MOVES: Final = _counter("placement_moves", "moves that ended, since this manager came to lead", "outcome")

CATALOGUE: Final = tuple(each for each in list(globals().values()) if isinstance(each, Metric))
"""All of them, as far as they are ours; ``process_*`` come from the client library."""
