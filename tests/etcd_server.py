"""Tests that need a real etcd."""

import pytest

from simulations.etcd_process import NO_ETCD, has_etcd

needs_etcd = pytest.mark.skipif(not has_etcd(), reason=NO_ETCD)
