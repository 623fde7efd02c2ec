"""Clients of a proxy: ``connect`` for asyncio, ``connect_blocking`` for everybody else."""

from onepiece.client._http import ClientOptions
from onepiece.client.api import InputInfo, NodeInfo, WorkflowInfo
from onepiece.client.blocking import BlockingClient, BlockingRequestHandle, connect_blocking
from onepiece.client.client import Client, connect
from onepiece.client.handle import RequestHandle

__all__ = [
    "BlockingClient",
    "BlockingRequestHandle",
    "Client",
    "ClientOptions",
    "InputInfo",
    "NodeInfo",
    "RequestHandle",
    "WorkflowInfo",
    "connect",
    "connect_blocking",
]
