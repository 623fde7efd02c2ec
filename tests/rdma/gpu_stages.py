"""Stages on a GPU that each process pretends to have which imports them, for nodes over verbs.

The GPU's memory is the host's, so that adapters can be given its addresses as they are: so they are a GPU's
under nvidia_peermem.
"""

import asyncio
import ctypes
import mmap
import os
from pathlib import Path
from typing import Final
from unittest import mock

from onepiece import workflow
from tests.node import gpu_stages
from tests.runtime.pretended_gpu import CountingDriver, pretended_gpu
from transports.cuda import CudaDevice

FIRST_RUN: Final = "FIRST_RUN_FILE"
"""The variable with the path of a file; the first that runs ``look`` writes its process there, and hangs."""


class ReachableDriver(CountingDriver):
    """Its memory is the host's."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes = {116: 1, 117: 1}

    def _cuMemAlloc(self, into: int, size: int) -> int:  # noqa: N802 - named as the driver's
        if self._device is None:
            return 201
        memory = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.memory[address] = memory
        self.owner[address] = self._device - 10
        ctypes.c_uint64.from_address(into).value = address
        return 0


def _is_first() -> bool:
    try:
        with Path(os.environ[FIRST_RUN]).open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


async def _hang_once(node: str) -> None:
    if _is_first():
        await asyncio.sleep(3600)


@workflow
def shown(seed: int, length: int) -> str:
    """Two stages on GPUs."""
    return gpu_stages.look(gpu_stages.paint(seed, length))


if FIRST_RUN in os.environ:  # in a node, not in whoever collects tests
    _PRETENDED = pretended_gpu(ReachableDriver())
    _PRETENDED.__enter__()
    mock.patch.object(CudaDevice, "check_peer_access").start()
    gpu_stages.hooks["look"] = _hang_once
