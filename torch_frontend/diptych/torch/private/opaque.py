"""torch's opaque types: objects that an op takes as constants of a graph. Where torch lacks them, `AVAILABLE` is False:
diptych runs eagerly, and torch.compile breaks graphs at it (`primitives/constants.py` warns of it)."""

from __future__ import annotations

from typing import Any

from diptych.torch.private.require import known, later

_USE, _ALL = "to make recipes and quantizers constants of graphs", ("2.11", "2.13", "2.14")
MemberType = known(_USE, "torch._library.opaque_object.MemberType", *_ALL)
opaque_name = known(_USE, "torch._library.opaque_object.get_opaque_type_name", *_ALL)
# torch 2.14 has other names for both, and logs a warning for each use of the old ones.
_register = known(_USE, "torch._library.opaque_object.register_custom_class", "2.14")
_register_by_value = known(_USE, "torch._library.opaque_object.register_opaque_type", *_ALL)
# The metaclass that torch 2.11 asks of opaque types.
OpaqueMeta = known(_USE, "torch._custom_class_base.CustomClassBaseMeta", "2.14") or known(
    _USE, "torch._opaque_base.OpaqueBaseMeta", *_ALL
)
AVAILABLE = None not in (MemberType, opaque_name, _register or _register_by_value, OpaqueMeta)


def register_opaque(cls: type, members: dict[str, Any]) -> None:
    """Makes objects of a class constants of graphs, compared by value. `members`: what Dynamo may read of them."""
    if _register is not None:
        _register(cls, typ="constant", members=members)
    else:
        _register_by_value(cls, typ="value", members=members)


# Process groups as opaque types. Where torch lacks them, an op takes a group by its name.
register_groups = known(
    "to make process groups arguments of ops",
    "torch.distributed.device_mesh._register_distributed_opaque_types",
    "2.13",
    "2.14",
)
group_named = later("to find a process group by its name", "torch.distributed.distributed_c10d._resolve_process_group")
