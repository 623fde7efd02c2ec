"""OnePiece: stages are async functions, workflows draw graphs of them, tensors travel through double rings.

::

    from onepiece import Gpu, StageContext, Tensor, stage, workflow

    @stage(resources=Gpu(memory_gib=4))
    async def upscale(ctx: StageContext[None], image: Tensor, factor: int = 2) -> Tensor: ...

    @workflow
    def larger(image: Tensor) -> Tensor:
        return upscale(image)

Importing this package imports neither torch nor a server; the client comes in when it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

from onepiece import _program  # noqa: F401 - before all that takes time: Ctrl-C is quiet from here on
from onepiece.context import StageContext
from onepiece.errors import (
    CodecError,
    ConfigError,
    DeadlineExceeded,
    DefinitionError,
    InvalidInput,
    JoinBudgetExceeded,
    LeadershipLost,
    NodeLost,
    NodeUnreachable,
    NotReady,
    OnePieceError,
    Overloaded,
    OwnedElsewhere,
    PayloadTooLarge,
    PlacementError,
    Rejected,
    RequestCancelled,
    RequestFailed,
    ResultGone,
    SchemaMismatch,
    StageFailed,
    StoreFull,
    UnknownNode,
    UnknownRequest,
    UnknownWorkflow,
    WiringError,
)
from onepiece.stage import Cpu, Gpu, Stage, stage
from onepiece.tensor import Tensor
from onepiece.workflow import Workflow, WorkflowCall, at_most_once, workflow

if TYPE_CHECKING:
    from onepiece.client import connect, connect_blocking

__all__ = [
    "CodecError",
    "ConfigError",
    "Cpu",
    "DeadlineExceeded",
    "DefinitionError",
    "Gpu",
    "InvalidInput",
    "JoinBudgetExceeded",
    "LeadershipLost",
    "NodeLost",
    "NodeUnreachable",
    "NotReady",
    "OnePieceError",
    "Overloaded",
    "OwnedElsewhere",
    "PayloadTooLarge",
    "PlacementError",
    "Rejected",
    "RequestCancelled",
    "RequestFailed",
    "ResultGone",
    "SchemaMismatch",
    "Stage",
    "StageContext",
    "StageFailed",
    "StoreFull",
    "Tensor",
    "UnknownNode",
    "UnknownRequest",
    "UnknownWorkflow",
    "WiringError",
    "Workflow",
    "WorkflowCall",
    "at_most_once",
    "connect",
    "connect_blocking",
    "stage",
    "workflow",
]

_FROM_CLIENT: Final = frozenset({"connect", "connect_blocking"})


def __getattr__(name: str) -> Any:
    """Import the client on first use: whoever only defines stages needs no HTTP."""
    if name in _FROM_CLIENT:
        return getattr(importlib.import_module("onepiece.client"), name)
    raise AttributeError(f"module 'onepiece' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
