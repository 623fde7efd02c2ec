"""Workflows by import: ``module:attribute`` to the object, and the check that all nodes mean the same.

A route table names workflows by where they are defined; every node imports them itself, since stage
code never travels. Two nodes that hold different versions of a file would exchange values that do not
fit, which elsewhere showed up as a hang or a wrong picture. So the digests are compared, and both
schemas stand in the error.
"""

import asyncio
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from traceback import extract_tb
from typing import Any

from onepiece._bounded import described
from onepiece.errors import ConfigError, OnePieceError, SchemaMismatch
from onepiece.runtime.unjoined import in_unjoined_thread
from onepiece.workflow import Workflow, load_workflow


def import_workflow(reference: str) -> Workflow[Any, Any]:
    """Import ``module:attribute``; raises ``OnePieceError`` saying what is wrong with it.

    The current directory is searched too, as ``python -m`` would do. Modules may take seconds to
    import: call it off the event loop.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return load_workflow(reference)
    except OnePieceError:
        raise
    except (Exception, SystemExit) as error:
        what = f"importing the module of {reference!r} raised {described(error)}{_place_of(error)}"
        raise ConfigError(what) from error


def _place_of(error: BaseException) -> str:
    """The line that raised, as a traceback names it; "" where only the import itself stands."""
    ours = {__file__, load_workflow.__code__.co_filename, importlib.__file__}
    frames = [
        frame
        for frame in extract_tb(error.__traceback__)
        if frame.filename not in ours and not frame.filename.startswith("<frozen importlib")
    ]
    return f" (raised at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""


class WorkflowImports:
    """The workflows this node has imported, by reference; each is imported once.

    Args:
        imported: What is imported already.
    """

    def __init__(self, imported: Mapping[str, Workflow[Any, Any]] | None = None) -> None:
        self._imported: dict[str, Workflow[Any, Any]] = dict(imported or {})
        self._lock = asyncio.Lock()

    async def get(self, reference: str, digest: str | None = None) -> Workflow[Any, Any]:
        """Import off the event loop; raises ``ConfigError``, ``DefinitionError`` or ``SchemaMismatch``."""
        async with self._lock:  # two imports at once gain nothing and confuse some libraries
            found = self._imported.get(reference)
            if found is None:
                found = await in_unjoined_thread(import_workflow, reference)
                self._imported[reference] = found
        if digest is not None and found.graph.digest != digest:
            raise SchemaMismatch(
                f"{reference} is not the same here as at the manager (digest {found.graph.digest} here, "
                f"{digest} there); install the same version on every node. Here it is:\n"
                f"{found.graph.schema_text}",
                workflow=reference,
            )
        return found
