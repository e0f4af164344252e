"""Recipes under TransformerEngine's path. All but `DelayedScaling` are diptych.common's."""

from __future__ import annotations

import dataclasses

from diptych.common import CustomRecipe as CustomRecipe
from diptych.common import DelayedScaling as _DelayedScaling
from diptych.common import Float8BlockScaling as Float8BlockScaling
from diptych.common import Float8CurrentScaling as Float8CurrentScaling
from diptych.common import Format as Format
from diptych.common import MMParams as MMParams
from diptych.common import MXFP8BlockScaling as MXFP8BlockScaling
from diptych.common import NVFP4BlockScaling as NVFP4BlockScaling
from diptych.common import QParams as QParams
from diptych.common import Recipe as Recipe
from diptych.common import te


@te.also_takes(_DelayedScaling, without="reduce_amax")
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DelayedScaling(_DelayedScaling):
    """diptych.common's `DelayedScaling`, and whether its amaxes are reduced over ranks.

    **Arguments:** `reduce_amax`: True, the default: `diptych.te.autocast` reduces over the group that it is given, or
    over all ranks. False: it reduces none. diptych.torch's `autocast` reduces over the group that it is given alone.
    """

    reduce_amax: bool = True
