"""CUDA devices: their memory for inboxes, and tensors of any library as bytes to be sent.
"""
from transports.device_memory import Device


def device_named(name: str) -> Device:
    raise ValueError(name)
