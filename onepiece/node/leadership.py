"""The coordinator that a node's options name."""

import ssl
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from onepiece.coordination import Coordinator
from onepiece.errors import ConfigError
from onepiece.node.options import NodeOptions
from onepiece.node.parts import NodeParts


def opening_coordinator(
    options: NodeOptions, parts: NodeParts, state_dir: Path, own: str
) -> AbstractAsyncContextManager[Coordinator]:
    """What opens it.

    Args:
        options: The node's settings.
        parts: Where the embedded coordinator comes from.
        state_dir: Where that one keeps the manager's state.
        own: The node's control address, which others are told while it leads.

    Raises:
        ConfigError: The files for TLS cannot be used.
    """
    chosen = options.coordination
    if not chosen.members:
        return parts.open_coordinator(state_dir / "manager")
    from onepiece.coordination.etcd import EtcdOptions, open_etcd

    tls = _tls(options) if chosen.is_tls else None
    return open_etcd(EtcdOptions(chosen.members, chosen.prefix, own, options.leader_seconds, tls=tls))


def _tls(options: NodeOptions) -> ssl.SSLContext:
    """The context for etcd: it is spoken to with the certificates that nodes show each other."""
    try:
        context = ssl.create_default_context(cafile=options.tls_authority)
        if options.tls_certificate is not None:
            context.load_cert_chain(options.tls_certificate, options.tls_key)
    except OSError as error:
        raise ConfigError(f"the certificates for etcd cannot be used: {error}") from error
    return context
