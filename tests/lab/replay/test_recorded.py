"""Operations are found by keys, names and equal bits; every reason why one cannot be computed is named."""

import dataclasses

import numpy as np
import pytest
import trace_tools
from op_tools import entries, op, trace

from diptych.lab.replay.op import ReplayError
from diptych.lab.replay.recorded import recorded
from diptych.lab.traces import Entry, Trace
from diptych.lab.traces.schema import Operation

X = np.arange(6, dtype=np.float32).reshape(2, 3)
ADD = op("add", {"a": X, "b": X}, X + X)
SOFTMAX = op("softmax", {"x": X}, X / 3, axis=-1)
ACTIVATION = trace_tools.entry("h.0", SOFTMAX.outputs["out"].data, "float32")


@pytest.fixture
def opened(tmp_path):
    """Step 0 has an addition, step 1 two of them, a softmax and an activation with its bits."""
    second = op("add", {"a": X, "b": X[:1]}, X + X[:1])
    steps = [entries(ADD), [*entries(ADD), *entries(second, call=1), *entries(SOFTMAX, "h.0"), ACTIVATION]]
    return Trace.open(trace(tmp_path / "t", steps))


def found(opened, site, **where):
    return recorded(opened, site, **where)


def test_by_key_and_name(opened):
    for site in ("result:h.0/add.out", "h.0/add.out"):
        got = found(opened, site)
        assert got.op.kind == "add" and got.op.options == {}
        assert [o.site.key for o in got.operands.values()] == ["operand:h.0/add.a", "operand:h.0/add.b"]
        np.testing.assert_array_equal(got.op.inputs["b"].floats, X)
        np.testing.assert_array_equal(got.op.outputs["out"].floats, X + X)


def test_calls_are_told_apart(opened):
    got = found(opened, "result:h.0/add.out#1", step=1)
    assert got.op.inputs["b"].data.shape == (1, 3) and got.operands["b"].site.call == 1
    assert found(opened, "h.0/add.out#1", step=1).op.inputs["b"].data.shape == (1, 3)
    with pytest.raises(ReplayError, match="is the name of 2 sites; give the key of one: result:h"):
        found(opened, "h.0/add.out", step=1)


def test_an_activation_with_a_results_bits_is_that_result(opened):
    got = found(opened, "activation:h.0", step=1)
    assert got.op.kind == "softmax" and got.op.options == {"axis": -1}
    assert list(got.results) == ["out"]


@pytest.mark.parametrize(
    ("site", "where", "why"),
    [
        ("h.0/add.out", {"rank": 1}, "has no rank 1; it has 0"),
        ("h.0/add.out", {"step": 7}, "has no step 7; it has 0, 1"),
        ("h.0/ad.out", {}, "'h.0/ad.out': the step has no such site; similar are .*h.0/add.out"),
        ("zzz", {}, "'zzz': the step has no such site(?m:$)"),
        ("operand:h.0/add.a", {}, "operand:h.0/add.a: no operation that computed it was recorded(?m:$)"),
    ],
)
def test_what_is_not_there(opened, site, where, why):
    with pytest.raises(ReplayError, match=why):
        found(opened, site, **where)


def changed(made, of, **fields):
    """Entries of an operation of which those of one kind have other fields."""
    return [e._replace(site=dataclasses.replace(e.site, **fields)) if e.site.kind == of else e for e in entries(made)]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (changed(ADD, "result", inputs=("operand:h.0/add.a",)), "operand b of add was not recorded"),
        (changed(ADD, "result", operation=Operation("fft", "{}")), "'fft' is no operation"),
        (changed(ADD, "result", operation=Operation("add", "{")), "add: options: is no JSON"),
        (changed(ADD, "result", operation=Operation("silu", "{}")), "operand x of silu was not recorded"),
        (changed(SOFTMAX, "result", operation=None), "no operation that computed it"),
        (
            [trace_tools.entry("h.0/add.c", X.view("u4"), "float32", "operand"), *entries(ADD)[:2]]
            + [
                Entry(dataclasses.replace(e.site, inputs=(*e.site.inputs, "operand:h.0/add.c")), *e[1:])
                for e in entries(ADD)[2:]
            ],
            "add has no operand 'c'",
        ),
    ],
)
def test_operations_that_are_no_row_or_lack_operands(tmp_path, made, why):
    opened = Trace.open(trace(tmp_path / "t", [made]))
    with pytest.raises(ReplayError, match=why):
        recorded(opened, made[-1].site.key)


@pytest.mark.parametrize("how", [{"values": "hash"}, {"budget": 40}])
def test_values_that_are_not_whole(tmp_path, how):
    opened = Trace.open(trace(tmp_path / "t", [entries(ADD)], **how))
    with pytest.raises(ReplayError, match='its values are not whole in the trace; capture with values="full"'):
        recorded(opened, "h.0/add.out")


def test_own_operations_alone(tmp_path):
    folder = trace_tools.write(tmp_path / "t", [[ACTIVATION]])
    with pytest.raises(ReplayError, match='capture with ops="all" records operations of the framework too'):
        recorded(Trace.open(folder), "h.0")


def test_a_trace_without_steps(tmp_path):
    with pytest.raises(ReplayError, match="rank 0 has completed no step"):
        recorded(Trace.open(trace(tmp_path / "t", [])), "h.0")
