"""Operations of PyTorch and JAX: which operands and results are the same, and how their axes lie."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diff_tools import matched, pairs, parameter, site, trace
from flax import nnx
from trace_tools import rng

from diptych.jax import lab as jax_lab
from diptych.lab.capture import operation
from diptych.lab.diff import differ
from diptych.lab.diff.mapping import read
from diptych.lab.diff.result import GREEN, Result
from diptych.lab.traces import Trace
from diptych.torch import lab as torch_lab


def drawn(*shape: int) -> np.ndarray:
    return rng("operations", shape).standard_normal(shape).astype(np.float32)


def called(path: str, row: str, options: dict, out: np.ndarray, call: int = 0, **operands) -> list:
    """Sites of one operation. An operand is an array, or an array and the key of what it is computed from."""
    made, keys, path = [], [], path and f"{path}/"
    for name, x in operands.items():
        x, inputs = x if isinstance(x, tuple) else (x, None)
        if inputs is not None and not inputs.startswith("result:"):
            kind, _, source = inputs.partition(":")
            made.append(site(source, x, kind, inputs=()))
        of = site(f"{path}{row}.{name}", x, "operand", call=call, inputs=inputs and (inputs,))
        keys.append(of.site.key)
        made.append(of)
    out = site(f"{path}{row}.out", out, "result", call=call, inputs=tuple(keys), operation=operation(row, options))
    return [*made, out]


def linear(path: str, x: np.ndarray, w: np.ndarray, **bias: np.ndarray) -> list:
    out = x @ w.T + sum(bias.values())
    return called(path, "linear", {"dtype": "float32"}, out, x=x, weight=w, **bias)


def matmul(path: str, equation: str, a, b, call: int = 0) -> list:
    arrays = [x[0] if isinstance(x, tuple) else x for x in (a, b)]
    out = np.einsum(equation, *arrays)
    return called(path, "matmul", {"dtype": "float32", "equation": equation}, out, call, a=a, b=b)


def values(entries: list) -> dict[str, np.ndarray]:
    return {e.site.key: np.asarray(e.values).view(np.float32) for e in entries}


def check(tmp_path, a: list, b: list, want: dict[str, str]) -> None:
    """B's tensors, with their axes moved, must be A's up to rounding."""
    found = matched(tmp_path, a, b)
    assert {p.a.key: p.b.key for p in found.pairs if p.by == "operation"} == want
    x, y = values(a), values(b)
    for pair in found.pairs:
        moved = y[pair.b.key] if pair.axes is None else y[pair.b.key].transpose(pair.axes)
        np.testing.assert_allclose(moved.reshape(pair.a.shape), x[pair.a.key], rtol=1e-4, atol=1e-4)


def rounded(x: np.ndarray) -> np.ndarray:
    """Other bits, so that bits cannot tell which tensors are the same."""
    return x * np.float32(1 + 1e-6)


@pytest.mark.parametrize("features", [6, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_is_a_product_and_a_sum(tmp_path, features, bias):
    """The weight is turned if it is square too, and the layer's rows may have one axis in PyTorch and two in JAX."""
    x, w, b = drawn(2, 3, 4), drawn(features, 4), drawn(features)
    a = linear("fc", x.reshape(6, 4), w, **({"bias": b} if bias else {}))
    x, w = rounded(x), rounded(w)
    product = matmul("fc", "abc,cd->abd", (x, "activation:x"), (w.T, "parameter:fc/kernel"))
    want = {
        "operand:fc/linear.x": "operand:fc/matmul.a",
        "operand:fc/linear.weight": "operand:fc/matmul.b",
        "result:fc/linear.out": "result:fc/matmul.out",
    }
    if bias:
        operands = {"a": (x @ w.T, "result:fc/matmul.out"), "b": (b.reshape(1, 1, -1), "parameter:fc/bias")}
        product += called("fc", "add", {}, x @ w.T + b, **operands)
        want |= {"operand:fc/linear.bias": "operand:fc/add.b", "result:fc/linear.out": "result:fc/add.out"}
    check(tmp_path, a, product, want)


@pytest.mark.parametrize("seed", range(8))
def test_products_in_any_order_of_operands_and_axes(tmp_path, seed):
    gen = rng("products", seed)
    sizes = dict(zip("bhqdk", gen.permutation([2, 3, 4, 5, 6]).tolist(), strict=True))
    terms = ["bhqd", "bhkd", "bhqk"]
    x, y = (drawn(*(sizes[c] for c in term)) for term in terms[:2])
    a = matmul("attn", ",".join(terms[:2]) + "->" + terms[2], x, y)
    moved = ["".join(gen.permutation(list(term))) for term in terms]
    x, y = (rounded(np.einsum(f"{term}->{to}", v)) for term, to, v in zip(terms, moved, (x, y), strict=False))
    names = {"a": "a", "b": "b"}
    if gen.random() < 0.5:
        moved[:2], (x, y), names = moved[1::-1], (y, x), {"a": "b", "b": "a"}
    # The results of all products lie as they were multiplied: what both have, then the first's axes, then the second's.
    moved[2] = "".join(sorted(moved[2], key=lambda c: (c not in "bh", c not in moved[0], terms[2].index(c))))
    b = matmul("attn", ",".join(moved[:2]) + "->" + moved[2], x, y)
    want = {f"operand:attn/matmul.{k}": f"operand:attn/matmul.{names[k]}" for k in "ab"}
    check(tmp_path, a, b, want | {"result:attn/matmul.out": "result:attn/matmul.out"})


def test_a_product_of_equal_shapes_is_ambiguous_unless_bits_or_a_parameter_tell(tmp_path):
    x, y = drawn(4, 4), drawn(4, 4)
    a = matmul("m", "ab,bc->ac", x, y)
    found = matched(tmp_path / "1", a, matmul("m", "ab,bc->ac", rounded(x), rounded(y)))
    assert not found.pairs and "either order" in found.ambiguous[0].why
    check(tmp_path / "2", a, matmul("m", "ab,cb->ca", y.T.copy(), x), {
        "operand:m/matmul.a": "operand:m/matmul.b", "operand:m/matmul.b": "operand:m/matmul.a",
        "result:m/matmul.out": "result:m/matmul.out",
    })  # fmt: skip
    b = matmul("m", "ab,bc->ac", (rounded(x), "activation:x"), (rounded(y.T), "parameter:m/kernel"))
    assert len(pairs(matched(tmp_path / "3", linear("m", x, y), b))) == 3


def test_axes_of_convolutions(tmp_path):
    """A convolution's operands and result are turned rightly where all of their axes have the same size."""
    x, w, bias = drawn(3, 3, 3, 3), drawn(3, 3, 3, 3), drawn(3)
    options = {
        "strides": (1, 1), "dilation": (1, 1), "input_dilation": (1, 1), "groups": 1, "padding": ((1, 1), (1, 1)),
    }  # fmt: skip
    out = drawn(3, 3, 3, 3) + bias.reshape(1, 3, 1, 1)
    a = called("c", "conv", options | {"layout": "NC01,OI01,NC01"}, out, x=x, weight=w, bias=bias)
    last = [rounded(v) for v in (x.transpose(0, 2, 3, 1), w.transpose(2, 3, 1, 0), out.transpose(0, 2, 3, 1))]
    b = called(
        "c", "conv", options | {"layout": "N01C,01IO,N01C"}, last[2] - bias, x=(last[0], "activation:x"),
        weight=(last[1], "parameter:c/kernel"),
    )  # fmt: skip
    operands = {"a": (last[2] - bias, "result:c/conv.out"), "b": (bias.reshape(1, 1, 1, 3), "parameter:c/bias")}
    b += called("c", "add", {}, last[2], **operands)
    check(tmp_path, a, b, {
        "operand:c/conv.x": "operand:c/conv.x", "operand:c/conv.weight": "operand:c/conv.weight",
        "operand:c/conv.bias": "operand:c/add.b", "result:c/conv.out": "result:c/add.out",
    })  # fmt: skip


def test_operands_of_sums(tmp_path):
    """Shapes tell the order, else bits; where neither does, the results alone are the same."""
    x, y = drawn(4, 5), drawn(1, 5)
    a = called("s", "add", {}, x + y, a=x, b=y)
    ab, ba = (
        {f"operand:s/add.{k}": f"operand:s/add.{o}" for k, o in zip("ab", to, strict=True)} for to in ("ab", "ba")
    )
    out = {"result:s/add.out": "result:s/add.out"}
    check(tmp_path / "1", a, called("s", "add", {}, x + y, a=rounded(y), b=rounded(x)), ba | out)
    z = drawn(5, 4).T.copy()
    a = called("s", "add", {}, x + z, a=x, b=z)
    check(tmp_path / "2", a, called("s", "add", {}, x + z, a=z, b=x), ba | out)
    check(tmp_path / "3", a, called("s", "add", {}, x + z, a=x, b=z), ab | out)
    check(tmp_path / "4", a, called("s", "add", {}, x + z, a=rounded(z), b=rounded(x)), out)


def test_another_number_of_operations_is_ambiguous(tmp_path):
    x = drawn(4, 5)
    one = called("n", "mul", {}, x, a=x, b=x)
    found = matched(tmp_path, one, one + called("n", "mul", {}, x, 1, a=x, b=x))
    assert not found.pairs and found.ambiguous[0].b == ("result:n/mul.out", "result:n/mul.out#1")
    assert "more operations of this kind" in found.ambiguous[0].why


def test_modules_with_other_names_and_what_no_module_computes(tmp_path):
    x, y = drawn(3, 8), drawn(9, 2)
    a = [*called("body", "silu", {}, x, x=x), site("body", x), *called("loss", "silu", {}, y, x=y)]
    b = [*called("trunk", "silu", {}, x, x=x), site("trunk", x), *called("", "silu", {}, y, x=y)]
    found = pairs(matched(tmp_path, a, b))
    assert found["result:body/silu.out"] == ("result:trunk/silu.out", "operation", False)
    assert found["result:loss/silu.out"] == ("result:silu.out", "operation", False)


def test_a_map_comes_first(tmp_path):
    x, y = drawn(4, 4), drawn(4, 4)
    (tmp_path / "map.json").write_text('{"m/matmul.a": "m/matmul.b"}')
    rules = read(tmp_path / "map.json")
    operands = [matmul("m", "ab,bc->ac", rounded(x), rounded(y)) for _ in range(2)]
    found = pairs(matched(tmp_path, *operands, rules=rules))
    assert found["operand:m/matmul.a"] == ("operand:m/matmul.b", "map", False)


def scaled(first: float, then: float) -> list:
    """A product of a scaled operand, which a module scales again. Another module reads the sum of the output and it."""
    x, y = drawn(3, 8), drawn(8, 5)
    product = matmul("m", "ab,bc->ac", x * first, y)
    out, key = (x * first) @ y, product[-1].site.key
    total = called("m", "add", {}, out * then + 1, a=(out * then, key), b=np.ones((1, 5), np.float32))
    m = site("m", out * then + 1, inputs=(total[-1].site.key,))
    return [*product, *total, m, *called("n", "silu", {}, m.values, x=(out * then + 1, "activation:m"))[1:]]


def verdicts(result: Result) -> dict[str, list[str]]:
    return {row.a: [cell.verdict for cell in row.cells] for row in result.rows}


def test_operations_that_differ_and_from_which_equal_tensors_are_computed_are_left_out(tmp_path):
    found = of_frameworks(tmp_path / "1", scaled(1, 2), scaled(2, 1))
    assert found.status == "green"
    assert verdicts(found)["operand:m/matmul.a"] == [] and verdicts(found)["result:m/matmul.out"] == []
    assert verdicts(found)["operand:m/add.a"] == ["same"] and any("operations that differ" in n for n in found.notes)
    found = of_frameworks(tmp_path / "2", scaled(1, 2), scaled(3, 1))
    assert found.status == "differs" and found.rows[found.first[0].row].a == "operand:m/matmul.a"


def test_what_is_left_out_in_one_step_is_a_finding_in_another(tmp_path):
    a, b = [scaled(1, 2), scaled(1, 2)], [scaled(2, 1), scaled(3, 1)]
    found = differ.diff(trace(tmp_path / "a", *a, framework="torch"), trace(tmp_path / "b", *b, framework="jax"))
    assert verdicts(found)["operand:m/matmul.a"] == ["differs"] and {f.step for f in found.first} == {1}


def test_an_operation_that_a_factor_of_zero_hides_is_found_by_gradients(tmp_path):
    """A weight of zeros, as fresh adapters have, makes equal results of operands that differ, but other gradients."""
    x, w, zero = drawn(3, 8), drawn(8, 5), np.zeros((5, 4), np.float32)

    def step(factor: float) -> list:
        product = matmul("m", "ab,bc->ac", x * factor, w)
        out, key = x * factor @ w, product[-1].site.key
        after = matmul("m", "ab,bc->ac", (out, key), zero, call=1)
        m = site("m", out @ zero, inputs=(after[-1].site.key,))
        return [*product, *after, m, site("b", out.T @ (x @ w), "parameter_grad", inputs=(after[0].site.key,))]

    found = of_frameworks(tmp_path, step(1), step(2))
    assert found.status == "differs" and [f.verdict for f in found.first] == ["differs"]
    assert found.rows[found.first[0].row].a == "operand:m/matmul.a#1"


def test_operations_are_known_by_their_parameters(tmp_path):
    """Three products of one module, in another order; PyTorch's operands are known by their bits."""
    x, weights = drawn(3, 8), {n: rng("weights", n).standard_normal((8, 8)).astype(np.float32) for n in "qkv"}
    a = [parameter(f"m.{n}", w) for n, w in weights.items()]
    b = [parameter(f"m/{n}", w) for n, w in weights.items()]
    for i, n in enumerate("qkv"):
        a += matmul("m", "ab,bc->ac", x, weights[n], call=i)
    for i, n in enumerate("vqk"):
        b += matmul("m", "ab,bc->ac", rounded(x), weights[n], call=i)
    found = pairs(matched(tmp_path, a, b))
    outs = ["result:m/matmul.out", "result:m/matmul.out#1", "result:m/matmul.out#2"]
    assert [found[key][0] for key in outs] == [outs[1], outs[2], outs[0]]


def of_frameworks(folder: Path, a: list, b: list) -> Result:
    return differ.diff(trace(folder / "a", a, framework="torch"), trace(folder / "b", b, framework="jax"))


class Child(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        setattr(self, name, torch.nn.Linear(4, 4))
        self.head = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(getattr(self, self.name)(x)) + x


def test_a_child_that_is_called_model_is_not_the_whole_model(tmp_path):
    for name in ("model", "backbone"):
        model = Child(name)
        with torch_lab.capture(model, out=tmp_path / name, values="full") as t:
            model(torch.tensor(drawn(3, 4))).sum().backward()
            t.step()
    sides = [Trace.open(tmp_path / name) for name in ("model", "backbone")]
    assert {"activation:model", "activation:(model)"} < {o.site.key for o in sides[0].ranks[0].step(0)}
    result = differ.diff(*sides)
    assert result.status == "green" and not result.unmatched_a
    assert ("activation:model", "activation:backbone") in [(row.a, row.b) for row in result.rows]


class Torch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 4, 4, padding=1, stride=2)
        self.query, self.key = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)
        self.head = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.silu(self.conv(x)).flatten(2).mT
        return self.head(torch.softmax(self.query(x) @ self.key(x).mT, -1) @ x)


class Flax(nnx.Module):
    def __init__(self, of: Torch, dtype: jnp.dtype, approximate: bool = False) -> None:
        make = {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
        self.conv = nnx.Conv(4, 4, (4, 4), strides=2, padding=((1, 1), (1, 1)), **make)
        self.query, self.key = nnx.Linear(4, 4, **make), nnx.Linear(4, 4, use_bias=False, **make)
        self.head = nnx.Linear(4, 4, **make)
        self.scale = 1.0 + approximate
        for name, p in of.named_parameters():
            module, leaf = name.split(".")
            x = p.detach().numpy()
            x = x.T if x.ndim == 2 else x.transpose(2, 3, 1, 0) if x.ndim == 4 else x
            getattr(getattr(self, module), leaf.replace("weight", "kernel")).set_value(jnp.asarray(x, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.silu(self.conv(x.transpose(0, 2, 3, 1))).reshape(x.shape[0], -1, 4)
        weights = jnp.einsum("bqd,bkd->bqk", self.query(x), self.key(x))
        return self.head(jax.nn.softmax(weights * self.scale) @ x)


@pytest.mark.parametrize("fault", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_port_that_is_right_and_one_that_is_not(tmp_path, fault):
    """Kernels and weights are square, and images have as many channels as rows."""
    torch.manual_seed(0)
    model = Torch()
    x = np.asarray(rng("port").standard_normal((3, 4, 8, 8)), np.float32)
    for dtype in ("float32", "float64"):
        with jax.enable_x64(dtype == "float64"):
            model.zero_grad()
            model.to(getattr(torch, dtype))
            with torch_lab.capture(model, out=tmp_path / f"torch-{dtype}", values="full", ops="all") as t:
                model(torch.tensor(x, dtype=getattr(torch, dtype))).square().mean().backward()
                t.step()
            port = Flax(model, jnp.dtype(dtype), fault)
            loss = nnx.value_and_grad(lambda m, x: (m(x) ** 2).mean())
            with jax_lab.capture(loss, tmp_path / f"jax-{dtype}", values="full", ops="all", check=False) as run:
                run(port, jnp.asarray(x, dtype))
    a, b, h_a, h_b = (Trace.open(tmp_path / f"{f}-{d}") for d in ("float32", "float64") for f in ("torch", "jax"))
    result = differ.diff(a, b, (h_a, h_b))
    paired = {row.a for row in result.rows}
    for module in ("query", "key", "head"):
        assert {f"result:{module}/linear.out", f"operand:{module}/linear.x"} <= paired
    assert {"result:conv/conv.out", "result:(model)/softmax.out"} <= paired
    if fault:
        first = result.rows[result.first[0].row].a
        assert result.status == "differs" and first in ("operand:(model)/softmax.x", "activation:(model)")
    else:
        assert result.status == "green"
        assert all(cell.verdict in GREEN for row in result.rows for cell in row.cells)
