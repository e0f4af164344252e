"""A small torch model for bisections on a GPU, right and with a fault, as factories without arguments."""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, approximate="none", eps=1e-5):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32, eps=eps)
        self.act = nn.GELU(approximate)

    def forward(self, x):
        return F.softmax(self.down(self.act(self.up(self.norm(x)))), -1)


def right():
    return Model()


def gelu():
    return Model(approximate="tanh")


def epsilon():
    return Model(eps=1e-2)
