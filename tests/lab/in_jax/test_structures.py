"""Structures of arrays: places as torch's captures spell them, and what stays the object that it is."""

import dataclasses

import jax
import jax.numpy as jnp

from diptych.lab.bisect.forward import Slot
from diptych.lab.jax.structures import described, placed


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Output:
    logits: jax.Array
    states: tuple


def test_places():
    leaves, tree = placed({"out": Output(jnp.ones(2), (jnp.zeros(1), 3)), "n": [4.0]})
    places = dict(leaves)
    assert list(places) == ['["n"][0]', '["out"]["logits"]', '["out"]["states"][0]', '["out"]["states"][1]']
    assert places['["out"]["states"][1]'] == 3
    assert tree.unflatten([x for _, x in leaves])["n"] == [4.0]


def test_arguments_get_taps_and_slots():
    x, y = jnp.ones(2), jnp.zeros(3)

    def tap(value, place):
        return (value + 1, Slot(place)) if value is x else None

    given = {"a": [x, (2, "b")], "b": y}
    made, slots = described(given, tap)
    assert made["a"][0].tolist() == [2, 2] and made["a"][1] == (2, "b") and made["b"] is y
    assert slots == {"a": [Slot('["a"][0]'), (2, "b")], "b": y} and given["a"][0] is x


def test_what_gets_no_tap_stays_the_object_that_it_is():
    """A module may fill a list of its caller's."""
    filled, options = [], {"deep": {"n": 1}, "filled": []}
    made, slots = described((filled, options), lambda value, place: None)
    assert made[0] is filled and made[1] is options
    filled.append(3)
    assert slots == ([], {"deep": {"n": 1}, "filled": []})
