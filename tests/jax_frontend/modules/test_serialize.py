"""Files of quantized arrays, stacks and states: exported functions and flax's serialization."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import diptych.jax as dj
from diptych.common import ArgumentError, CheckpointError, UnsupportedError
from diptych.jax.modules import serialize
from diptych.jax.tensors.quantized import ABOUT
from jax_frontend import tools

fs = pytest.importorskip("flax.serialization")
import diptych.jax.nnx  # noqa: E402, F401  # registers the classes with flax

X = tools.normal("x", (32, 64))
STATE = dj.init_state(dj.DelayedScaling(amax_history_len=4))["weight"]
STATE = dataclasses.replace(STATE, amax_history=jnp.asarray([1, 0, 3, 2], jnp.float32), check=None)


def held(kind):
    """One of each class and kind of quantizer, with the bits of normal values."""
    if kind == "state":
        return STATE
    if kind == "stack":
        return dj.quantize_stack(jnp.stack([X, 2 * X]), dj.MXFP8Quantizer())
    drawn = tools.KINDS[kind]
    return dj.quantize(drawn.draw("x"), drawn.quantizer, **drawn.state(), as_bytes=kind == "mxfp8_e4m3-square")


KIND = pytest.mark.parametrize("kind", ["state", "stack", *tools.NOW])


@KIND
def test_flax_gives_the_bits_back(kind):
    tree = {"layer": [held(kind)], "step": jnp.zeros(3)}
    zeros = jax.tree.map(jnp.zeros_like, tree)
    data = fs.to_bytes(tree)
    tools.same_tree(fs.from_bytes(zeros, data), tree)
    tools.same_tree(fs.from_bytes(jax.eval_shape(lambda: tree), data), tree)
    assert not isinstance(jax.tree.leaves(fs.from_bytes(zeros, data))[0], np.ndarray)


@KIND
def test_exported_functions_take_and_return_them(kind):
    x = held(kind)
    run = jax.jit(lambda q: (q, jax.tree.map(lambda leaf: leaf, [q])))
    data = jax.export.export(run, disabled_checks=dj.export_safety_checks())(x).serialize()
    tools.same_tree(jax.export.deserialize(data).call(x), (x, [x]))


def test_exported_functions_compute_on_them():
    q, d = dj.quantize(X, dj.MXFP8Quantizer()), dj.DelayedScaling(amax_history_len=4)
    states = dj.init_state(d)

    def run(q, states):
        return dj.dense(X, q, recipe=dj.MXFP8BlockScaling()), dj.dense(X, X, recipe=d, state=states, return_state=True)

    data = jax.export.export(jax.jit(run), disabled_checks=dj.export_safety_checks())(q, states).serialize()
    tools.same_tree(jax.export.deserialize(data).call(q, states), jax.jit(run)(q, states))


def changed(state, **changes):
    """The state dict of {"q": state} with parts replaced; None removes one."""
    out = {**fs.to_state_dict(state), **changes}
    return {"q": {k: v for k, v in out.items() if v is not None}}


def test_flax_refuses_files_of_something_else():
    q, other = held("mxfp8_e4m3"), held("mxfp8_e4m3-square")
    about = json.loads(fs.to_state_dict(q)["about"])
    quantizer = about["quantizer"]
    cases = {
        "QuantizedArray at ./q: the file's has .*with_2d_quantization=True": fs.to_state_dict({"q": other}),
        "at ./q: the file holds no QuantizedArray": {"q": np.zeros(3)},
        "the file's arrays are": changed(q, rowwise_data=None),
        r"rowwise_data is float32\[2\], the target's is float8": changed(q, rowwise_data=np.zeros(2, np.float32)),
        "rowwise_data must be an array, got str": changed(q, rowwise_data="x"),
        "description of a QuantizedArray is damaged": changed(q, about="{"),
        "must be described by": changed(q, about="[]"),
        "must be a list of sizes": changed(q, about=json.dumps(about | {"leading": [-1]})),
        "dtype of a QuantizedArray must be a string": changed(q, about=json.dumps(about | {"dtype": 3})),
        "must be written as its class": changed(q, about=json.dumps(about | {"quantizer": 3})),
        "class 'os:system', which this process does not have": changed(
            q, about=json.dumps(about | {"quantizer": quantizer | {"class": "os:system"}})
        ),
    }
    for words, state in cases.items():
        with pytest.raises(CheckpointError, match=words):
            fs.from_state_dict({"q": q}, state)
    longer = dj.init_state(dj.DelayedScaling(amax_history_len=5))["weight"]
    with pytest.raises(CheckpointError, match="amax_history_len=4"):
        fs.from_bytes({"s": longer}, fs.to_bytes({"s": STATE}))


def test_exported_descriptions_that_are_damaged_are_named():
    for data, words in ((b"\xff", "damaged"), (b"{}", "must be described by")):
        with pytest.raises(CheckpointError, match=words):
            serialize._read(dj.QuantizedArray, data, ABOUT)


def test_what_cannot_be_written_is_named():
    with pytest.raises(ArgumentError, match="holds references"):
        fs.to_bytes(dj.state_refs({"weight": STATE}))
    algo = dataclasses.replace(STATE, quantizer=STATE.quantizer.replace(amax_compute_algo=max))
    with pytest.raises(ArgumentError, match="amax_compute_algo"):
        fs.to_bytes(algo)
    (b,) = jax.export.symbolic_shape("b")
    quantize = jax.jit(lambda x: dj.quantize(x, dj.MXFP8Quantizer(columnwise=False)))
    exported = jax.export.export(quantize, disabled_checks=dj.export_safety_checks())(
        jax.ShapeDtypeStruct((b, 64), jnp.float32)
    )
    with pytest.raises(UnsupportedError, match="symbolic sizes"):
        exported.serialize()


@pytest.mark.parametrize("modules", ("linen", "nnx"))
def test_modules_register_the_classes(modules):
    """`diptych.jax` alone does not import flax."""
    program = (
        "import sys, diptych.jax as dj; assert 'flax' not in sys.modules; import flax.serialization as fs; "
        f"import diptych.jax.{modules}; "
        "state = dj.init_state(dj.DelayedScaling()); assert isinstance(fs.to_state_dict(state['weight']), dict); "
        "fs.from_bytes(state, fs.to_bytes(state))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
