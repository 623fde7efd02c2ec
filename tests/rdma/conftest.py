"""These tests need RDMA devices: ``make test-rdma`` runs them in a machine that has two."""

import pytest

from tests.rdma.devices import PRODUCERS
from transports.verbs_devices import SETTINGS_VARIABLE, devices_of


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs devices where there are none, and say where they run."""
    names = {device.name for device in devices_of()}
    if {"rxe0", "rxe1"} <= names:
        return
    reason = (
        "no RDMA devices rxe0 and rxe1 here: `make test-rdma` runs this in a virtual machine that has them"
    )
    for item in items:
        if item.path.parent.name == "rdma":
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _producers_leave_by_the_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that packets really travel between two devices."""
    monkeypatch.setenv(SETTINGS_VARIABLE, PRODUCERS)
