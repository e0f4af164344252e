"""Identity of value objects: opt-in, by content, and never with a process group inside."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from typing import Any

import pytest

from diptych.common import (
    CustomRecipe,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    Quantizer,
    format_by_name,
)
from diptych.common.value import Value


class ProcessGroup:
    """As torch.distributed's, by name."""


class Subgroup(ProcessGroup):
    pass


class Live(Quantizer):
    """A user's class that does not opt in."""

    format = format_by_name("mxfp8_e4m3")

    def __init__(self, state: Any, **usage: bool) -> None:
        super().__init__(**usage)
        object.__setattr__(self, "state", state)


class Rotated(Quantizer):
    """A user's class that opts in, with something that is derived from its value."""

    format = format_by_name("mxfp8_e4m3")

    def __init__(self, size: int, **usage: bool) -> None:
        super().__init__(**usage)
        object.__setattr__(self, "size", size)
        self._init_derived()

    def _value_fields(self) -> tuple[str, ...]:
        return ("rowwise", "columnwise", "size")

    def _init_derived(self) -> None:
        object.__setattr__(self, "matrix", [[1.0] * self.size] * self.size)  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Clipped(MXFP8Quantizer):
    """A dataclass over a built-in one, written as a user would."""

    limit: float = 1.0


class Extended(MXFP8Quantizer):
    """An attribute that the dataclass fields of its base know nothing of."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        object.__setattr__(self, "limit", limit)


def rebuilt(value: Value) -> Any:
    expression, names = value.__fx_repr__()
    return eval(expression, dict(names))


def test_a_class_that_does_not_opt_in_is_compared_by_identity():
    a, b = Live(1), Live(1)
    assert a == a and a != b and hash(a) != hash(b) and len({a, b}) == 2
    row = a.with_usage(columnwise=False)
    assert row.state is a.state and not row.columnwise and a.columnwise
    with pytest.raises(TypeError, match="Live is compared by identity"):
        a.__fx_repr__()
    assert Extended(1.0) != Extended(1.0), "two that differ in what equality cannot see must not be one"


def test_a_rebuilt_object_has_its_derived_state_and_no_init():
    a = Rotated(4)
    assert a == Rotated(4) and hash(a) == hash(Rotated(4)) and a != Rotated(2)
    b = rebuilt(a)
    assert b == a and b.matrix == a.matrix and b.matrix is not a.matrix
    assert a.with_usage(rowwise=False).matrix == a.matrix
    Rotated.__init__, init = None, Rotated.__init__  # type: ignore[assignment,method-assign]
    try:
        assert rebuilt(a) == a
    finally:
        Rotated.__init__ = init  # type: ignore[method-assign]


def test_a_dataclass_of_a_user_is_a_value():
    assert Clipped(limit=2.0) == Clipped(limit=2) != Clipped() and rebuilt(Clipped(limit=3.0)) == Clipped(limit=3.0)
    assert Clipped().__eq__(MXFP8Quantizer()) is NotImplemented and Clipped() != MXFP8Quantizer()


def closure(group: Any) -> Any:
    return lambda role: group and None


@pytest.mark.parametrize(
    "hide",
    [
        lambda g: g,
        lambda g: [{"a": (g,)}],
        lambda g: {g},
        lambda g: functools.partial(print, 1, end=g),
        lambda g: closure(g),
        lambda g: Live(g),
        lambda g: Live(g).quantize_impl,
    ],
    ids=["itself", "containers", "set", "partial", "closure", "another object", "method"],
)
@pytest.mark.parametrize("group", [ProcessGroup(), Subgroup()], ids=["group", "subclass"])
@pytest.mark.parametrize("make", [Float8CurrentScalingQuantizer, Clipped, lambda: Rotated(2)])
def test_a_process_group_raises_wherever_the_value_is_read(make, group, hide):
    q = make()
    object.__setattr__(q, "amax_reduction_group", hide(group))
    for read in (
        hash,
        lambda q: q == make(),
        lambda q: make() == q,
        lambda q: q.__fx_repr__(),
        lambda q: q.fingerprint,
    ):
        with pytest.raises(TypeError, match="amax_reduction_group holds a process group"):
            read(q)
    identity = Live(group)
    for read in (hash, lambda q: q == Live(None)):
        with pytest.raises(TypeError, match="state holds a process group"):
            read(identity)
    with pytest.raises(TypeError, match="qfactory holds a process group"):
        hash(CustomRecipe(closure(group)))


def test_the_check_is_no_assert():
    """It holds under python -O."""
    code = (
        "from diptych.common import MXFP8Quantizer\n"
        "class ProcessGroup: pass\n"
        "q = MXFP8Quantizer(); object.__setattr__(q, 'group', ProcessGroup())\n"
        "try: hash(q)\n"
        "except TypeError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True).stdout
    assert "MXFP8Quantizer.group holds a process group" in out


def factory(role: Any) -> Quantizer | None:
    return MXFP8Quantizer()


@dataclasses.dataclass(frozen=True)
class Factory:
    limit: float = 1.0

    def __call__(self, role: Any) -> Quantizer | None:
        return Clipped(limit=self.limit)


def test_custom_recipes_are_compared_by_their_factory():
    assert CustomRecipe(factory) == CustomRecipe(factory) and rebuilt(CustomRecipe(factory)) == CustomRecipe(factory)
    assert CustomRecipe(Factory(2.0)) == CustomRecipe(Factory(2.0)) != CustomRecipe(Factory())
    assert rebuilt(CustomRecipe(Factory(2.0))) == CustomRecipe(Factory(2.0))
    assert CustomRecipe(Factory(2.0)).fingerprint == CustomRecipe(Factory(2.0)).fingerprint
    assert CustomRecipe(Factory(2.0)).fingerprint != CustomRecipe(Factory()).fingerprint
    a, b = (CustomRecipe(lambda role: None) for _ in range(2))
    assert a == a and a != b and a.fingerprint != b.fingerprint, "a lambda is known by identity"
    assert rebuilt(a) == a


def test_assigning_a_field_says_what_to_do_instead():
    recipe = Float8CurrentScaling()
    for value, name, words in (
        (recipe, "fp8_format", r"dataclasses.replace\(it, fp8_format=...\)"),
        (recipe.fp8_gemm_fprop, "use_split_accumulator", "MMParams is a value, which plans and graphs share"),
        (recipe, "use_power_2_scales", "pass use_power_2_scales to the constructor"),
        (MXFP8Quantizer(), "rowwise", r"dataclasses.replace\(it, rowwise=...\)"),
    ):
        before = value.fingerprint
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"{type(value).__name__}.{name} cannot be .*{words}"):
            setattr(value, name, getattr(value, name, None))
        assert value.fingerprint == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        del recipe.fp8_format
