"""Functions on the states of a whole model: `prepare` makes them, `seed_rng` seeds its random generators."""

from __future__ import annotations

from torch import nn

from diptych.common.recipes import Recipe
from diptych.torch.modules.stateful import StatefulModule
from diptych.torch.state.autocast import recognize_pipelines


def prepare(model: nn.Module, recipe: Recipe | None = None) -> nn.Module:
    """Makes at once all states that a recipe needs: delayed scales with their histories, and random generators.

    Without it a module makes its states in its first forward. By then a copy of the model, a state dict that is loaded
    by its keys (torch.distributed.checkpoint) or a wrapper may exist that lacks them: prepare the model before. States
    are ordinary tensors on the device of a module's parameters, in inference mode too. States of a model on meta lie on
    meta, and get their initial values when `to_empty` moves them to a device. States that fit are kept.

    **Arguments:** `model`: changed in place; every `QuantizedModule` in it gets the states of all its `layers`.
    `recipe`: for modules without a recipe of their own; None prepares only modules that have one.

    **Returns:** `model`.

    **Raises:** TypeError for arguments of other kinds; CheckpointError if a loaded state is another recipe's.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepare: model must be a torch.nn.Module, got {type(model).__name__}")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"prepare: recipe must be a diptych.common.Recipe or None, got {type(recipe).__name__}")
    recognize_pipelines()
    for module in model.modules():
        if isinstance(module, StatefulModule):
            module.prepare_states(recipe)
    return model


def seed_rng(model: nn.Module, seed: int) -> None:
    """Gives every module of a model that can round stochastically its own stretch of one random stream.

    The stretch depends on a module's place in the model alone: the i-th module gets offsets from i * 2^40 on. Ranks of
    a data-parallel group should pass different seeds, and DistributedDataParallel `broadcast_buffers=False`, which
    would undo that. Ranks of a tensor-parallel group must pass the same seed: a tensor that is cut over them has the
    whole tensor's random bits.

    **Raises** ValueError for a seed outside of 0..2^64-1.
    """
    modules = [m for m in model.modules() if isinstance(m, StatefulModule)]
    for i, module in enumerate(modules):
        module.seed_rng(seed, i << 40)
