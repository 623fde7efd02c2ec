"""A proxy: requests let in, refused and ended, what it forecasts, and its HTTP side."""

from collections.abc import Collection, Iterator
from typing import Final

from onepiece import metrics_catalogue as catalogue
from onepiece.errors import (
    DeadlineExceeded,
    InvalidInput,
    JoinBudgetExceeded,
    NodeLost,
    NotReady,
    RequestCancelled,
    StageFailed,
    StoreFull,
)
from onepiece.limits import RECORDS_BYTES_MAX, RECORDS_MAX
from onepiece.metrics import Sample
from onepiece.node.proxy import ProxyApp
from onepiece.node.proxy_service import ProxyService
from onepiece.node.request_counts import ADMISSION_REASONS, RequestCounts

_ERRORS: Final = tuple(
    kind.__name__ for kind in (DeadlineExceeded, JoinBudgetExceeded, NodeLost, StageFailed, StoreFull)
)
_REASONS: Final = (*ADMISSION_REASONS, InvalidInput.__name__, NotReady.__name__)
"""Like the errors: shown before the first one happens, so that its coming is a rise."""


def requests(proxy: ProxyService) -> Iterator[Sample]:
    """The requests of this proxy, and what it forecasts."""
    yield from _ends(proxy.owner.counts, proxy.workflows())
    table, admission = proxy.owner.table, proxy.admission()
    yield catalogue.REQUESTS_IN_FLIGHT_LIMIT.of(admission["in_flight_max"])
    yield catalogue.REQUESTS_ENDED_KEPT.of(table.ended_count)
    yield catalogue.REQUESTS_ENDED_KEPT_LIMIT.of(RECORDS_MAX)
    yield catalogue.REQUESTS_ENDED_BYTES.of(table.ended_bytes)
    yield catalogue.REQUESTS_ENDED_LIMIT_BYTES.of(RECORDS_BYTES_MAX)
    yield catalogue.ERRORS_UNSTORED.of(len(proxy.owner.unstored))
    yield catalogue.ADMISSION_SHARE.of(admission["share"])
    yield catalogue.ADMISSION_DEMAND.of(admission["demand"])
    for workflow, found in admission["workflows"].items():
        yield catalogue.REQUESTS_IN_FLIGHT.of(found["in_flight"], workflow)
        if found["wait_seconds"] is not None:
            yield catalogue.ADMISSION_WAIT.of(found["wait_seconds"], workflow)


def _ends(counts: RequestCounts, workflows: Collection[str]) -> Iterator[Sample]:
    for metric, counted in (
        (catalogue.REQUESTS_ACCEPTED, counts.accepted),
        (catalogue.REQUESTS_ADOPTED, counts.adopted),
        (catalogue.REQUESTS_CANCELLED, counts.cancelled),
    ):
        for workflow in {*workflows, *counted}:
            yield metric.of(counted[workflow], workflow)
    for workflow in {*workflows, *counts.finished}:
        seconds = counts.finished[workflow]
        yield catalogue.REQUESTS_FINISHED.of(seconds.count, workflow)
        yield catalogue.REQUEST_SECONDS.of(seconds, workflow)
    for workflow, error in {(each, error) for each in workflows for error in _ERRORS} | {*counts.failed}:
        yield catalogue.REQUESTS_FAILED.of(counts.failed[workflow, error], workflow, error)
    shown = {(each, error) for each in workflows for error in (*_ERRORS, RequestCancelled.__name__)}
    for workflow, error in shown | {*counts.wasted_seconds}:
        seconds_wasted = counts.wasted_seconds.get((workflow, error), 0.0)
        yield catalogue.REQUEST_WASTED.of(seconds_wasted, workflow, error)


def http(app: ProxyApp) -> Iterator[Sample]:
    """Its HTTP side."""
    refused = app.refusals.by_reason
    shown = {(each, reason) for each in app.frontend.workflows() for reason in _REASONS}
    for workflow, reason in shown | {*refused}:
        yield catalogue.REQUESTS_REFUSED.of(refused[workflow, reason], workflow, reason)
    boundary, budget = app.boundary, app.budget
    yield catalogue.HTTP_IN_PROGRESS.of(boundary.in_progress)
    yield catalogue.HTTP_IN_PROGRESS_LIMIT.of(app.options.requests_max)
    yield catalogue.HTTP_REFUSED.of(boundary.refused)
    yield catalogue.HTTP_BODY_BYTES.of(budget.in_use)
    yield catalogue.HTTP_BODY_LIMIT_BYTES.of(budget.bytes_max)
