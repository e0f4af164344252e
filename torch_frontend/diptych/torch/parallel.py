"""Training on several GPUs with `torch.distributed`: the public face of the room `distributed`."""

from diptych.torch.distributed.checkpoint import Loaded, export, load, save
from diptych.torch.distributed.prepare import prepare

__all__ = ["Loaded", "export", "load", "prepare", "save"]
