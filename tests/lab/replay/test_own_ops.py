"""Operations of diptych in traces of both frameworks, computed again by both."""

import collections

import pytest
from own_steps import MODULES, RECORD, STEPS, not_described, operations

from diptych.common import RECIPES
from diptych.lab.frontend import require
from diptych.lab.trace import difference

PAIR = ("torch", "jax")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    made = {}

    def get(framework, kind, recipe):
        key = framework, kind, recipe
        if key not in made:
            folder = tmp_path_factory.mktemp("trace") / "t"
            made[key] = RECORD[framework](folder, kind, RECIPES[recipe])
        return made[key]

    return get


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("framework", PAIR)
def test_every_operation_has_the_same_bits_again(recorded, framework, kind, recipe):
    trace = recorded(framework, kind, recipe)
    assert not_described(trace) == set()
    for step in range(STEPS):
        ops = operations(trace, step)
        print(step, collections.Counter(op.kind for op in ops))
        for op in ops:
            for other in PAIR:
                again = require(other, "cpu").replay(op, "cpu")
                assert again.keys() == op.outputs.keys(), (op.kind, other)
                for name, bits in op.outputs.items():
                    assert difference(bits, again[name]).equal, (op.kind, name, other)
