"""Training on several GPUs with `torch.distributed`: the public face of the room `distributed`."""

from typing import TYPE_CHECKING, Any

from diptych.torch.distributed.checkpoint import Loaded, export, load, save
from diptych.torch.distributed.gather_quantized import gather_quantized as prepare

if TYPE_CHECKING:
    from diptych.torch.distributed.styles import ColwiseParallel, PairwiseParallel, RowwiseParallel, SequenceParallel

_STYLES = ("ColwiseParallel", "PairwiseParallel", "RowwiseParallel", "SequenceParallel")

__all__ = [
    "ColwiseParallel",
    "Loaded",
    "PairwiseParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "export",
    "load",
    "prepare",
    "save",
]


def __getattr__(name: str) -> Any:
    """Imports the styles when they are asked for: they derive from torch's, whose import takes seconds."""
    if name in _STYLES:
        from diptych.torch.distributed import styles

        return getattr(styles, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
