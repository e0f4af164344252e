"""Training on several GPUs with `torch.distributed`: the public face of the room `distributed`."""

from diptych.torch.distributed.prepare import prepare

__all__ = ["prepare"]
