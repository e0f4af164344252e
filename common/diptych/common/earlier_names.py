"""Names under which earlier versions of diptych saved objects, so that pickled files keep loading."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def keep(names: dict[str, Any]) -> None:
    """Lets `pickle` find objects by their earlier full dotted names: {"package.module.name": object}.

    A module that no longer exists is created, with only these names.
    """
    for full, value in names.items():
        module, _, name = full.rpartition(".")
        if module not in sys.modules:
            sys.modules[module] = ModuleType(module, "Names of an earlier version, for files that it saved.")
        setattr(sys.modules[module], name, value)
