"""Which sites are matched, by what, and which are not because there is more than one way."""

import json

import numpy as np
import pytest
from diff_tools import matched, pairs, parameter, site
from trace_tools import rng

from diptych.lab.diff import mapping
from diptych.lab.diff.result import DiffError


def drawn(*shape: int) -> np.ndarray:
    return rng("match", shape, np.random.default_rng().integers(2**60)).standard_normal(shape).astype(np.float32)


def rules(tmp_path, given) -> mapping.Rules:
    (tmp_path / "map.json").write_text(json.dumps(given))
    return mapping.read(tmp_path / "map.json")


def test_names_with_both_separators(tmp_path):
    a = [site(n, drawn(2, 3)) for n in ("h.0", "h.0.mlp", "(model)[0]", "h.0.fc/gemm.d")]
    b = [site(n, drawn(2, 3)) for n in ("h/0/mlp", "h/0", "(model)[0]", "h/0/fc/gemm.d")]
    found = matched(tmp_path, a, b)
    assert pairs(found) == {
        "activation:h.0": ("activation:h/0", "name", False),
        "activation:h.0.mlp": ("activation:h/0/mlp", "name", False),
        "activation:(model)[0]": ("activation:(model)[0]", "name", False),
        "activation:h.0.fc/gemm.d": ("activation:h/0/fc/gemm.d", "name", False),
    }
    assert not (found.unmatched_a or found.unmatched_b or found.ambiguous or found.notes)


def gpt2(prefix: str, sep: str, torch: bool) -> dict[str, np.ndarray]:
    """The parameters of Hugging Face's GPT-2: PyTorch's are [in, out] in its Conv1D, flax's are [out, in]."""
    gen = np.random.default_rng(1)
    weight, norm, embedding = ("weight",) * 3 if torch else ("kernel", "scale", "embedding")
    found = {f"wte{sep}{embedding}": gen.random((9, 8)), f"wpe{sep}{embedding}": gen.random((7, 8))}
    for i in range(2):
        for name, shape in (("ln_1", 8), ("attn.c_attn", (8, 24)), ("attn.c_proj", (8, 8)), ("mlp.c_fc", (8, 32))):
            path = f"h{sep}{i}{sep}{name.replace('.', sep)}{sep}"
            w = gen.random(shape)
            found[path + (norm if name == "ln_1" else weight)] = w if torch else w.T
            found[path + "bias"] = gen.random(np.shape(w)[-1])
    return {prefix + name: value.astype(np.float32) for name, value in found.items()}


def test_hugging_face_names(tmp_path):
    torch, flax = gpt2("transformer.", ".", True), gpt2("transformer/", "/", False)
    found = matched(tmp_path, [parameter(*x) for x in torch.items()], [parameter(*x) for x in sorted(flax.items())])
    assert len(found.pairs) == len(torch) and not found.ambiguous
    for pair in found.pairs:
        a, b = torch[pair.a.name], flax[pair.b.name]
        np.testing.assert_array_equal(b if pair.axes is None else b.transpose(pair.axes), a)
        assert (pair.axes is not None) == (a.ndim == 2 and "wte" not in pair.a.name and "wpe" not in pair.a.name)


def test_square_kernels_are_held_as_the_others(tmp_path):
    """A library whose kernels are [out, in] as in PyTorch: the kernel that is not square shows it."""
    a = [parameter("q.weight", drawn(4, 4)), parameter("fc.weight", drawn(8, 4))]
    b = [parameter("q/kernel", drawn(4, 4)), parameter("fc/kernel", drawn(8, 4))]
    assert [turned for *_, turned in pairs(matched(tmp_path / "1", a, b)).values()] == [False, False]
    b[1] = parameter("fc/kernel", drawn(4, 8))
    assert [turned for *_, turned in pairs(matched(tmp_path / "2", a, b)).values()] == [True, True]
    assert [turned for *_, turned in pairs(matched(tmp_path / "3", a[:1], b[:1])).values()] == [True]


def test_kernels_that_disagree_tell_nothing_of_square_ones(tmp_path):
    square, other = drawn(4, 4), drawn(8, 4)
    a = [parameter("sq.weight", square), parameter("up.weight", other), parameter("v.weight", drawn(6, 4))]
    b = [parameter("sq/kernel", square), parameter("up/kernel", other), parameter("v/kernel", drawn(4, 6))]
    assert pairs(matched(tmp_path / "bits", a, b))["parameter:sq.weight"] == ("parameter:sq/kernel", "table", False)
    b[0] = parameter("sq/kernel", drawn(4, 4))
    found = matched(tmp_path / "none", a, b)
    assert len(found.pairs) == 2 and found.ambiguous[0].a == ("parameter:sq.weight",)


def test_kernels_vote_before_a_map(tmp_path):
    a = [parameter("sq.weight", drawn(4, 4)), parameter("up.weight", drawn(8, 4))]
    b = [parameter("other/kernel", drawn(4, 4)), parameter("up/kernel", drawn(8, 4))]
    found = matched(tmp_path, a, b, rules=rules(tmp_path, {"sq.weight": "other/kernel"}))
    assert pairs(found)["parameter:sq.weight"] == ("parameter:other/kernel", "map", False)


def test_kernels_with_split_axes_are_not_compared(tmp_path):
    """Flat, a kernel of flax's DenseGeneral is the transposed weight. It says nothing of other kernels."""
    q, o = drawn(8, 8), drawn(8, 8)
    a = [parameter("q.weight", q), parameter("o.weight", o)]
    b = [parameter("q/kernel", q.T.reshape(8, 2, 4).copy()), parameter("o/kernel", o.T)]
    found = matched(tmp_path, a, b)
    assert pairs(found) == {"parameter:o.weight": ("parameter:o/kernel", "table", True)}
    assert [s.name for s in found.unmatched_a] == ["q.weight"] and not found.differs
    assert "parameter:q.weight [8, 8] and [8, 2, 4]" in found.notes[0]


def test_square_images(tmp_path):
    """Their shapes do not show where channels are; images that are not square do, else bits, else nothing."""
    x, y, flat = drawn(2, 8, 8, 8), drawn(2, 3, 8, 4), drawn(2, 5, 1, 5)
    turned = [np.moveaxis(v, 1, -1).copy() for v in (x, y, flat)]
    a = [site("conv", x), site("flat", flat), site("first", y)]
    b = [site("conv", drawn(2, 8, 8, 8)), site("flat", turned[2]), site("first", turned[1])]
    assert [t for *_, t in pairs(matched(tmp_path / "votes", a, b)).values()] == [True] * 3
    assert [t for *_, t in pairs(matched(tmp_path / "bits", a[:1], [site("conv", turned[0])])).values()] == [True]
    assert [t for *_, t in pairs(matched(tmp_path / "one", a[:1], b[:1], ("jax", "jax"))).values()] == [False]
    found = matched(tmp_path / "none", a[:2], b[:2])
    assert [p.a.name for p in found.pairs] == ["flat"] and "channels" in found.ambiguous[0].why


def test_images_and_merged_axes(tmp_path):
    a = [site("conv", drawn(2, 3, 4, 5)), site("fc", drawn(2, 3, 4)), site("q", drawn(2, 6, 4))]
    b = [site("conv", drawn(2, 4, 5, 3)), site("fc", drawn(6, 4)), site("q", drawn(2, 6, 2, 2))]
    found = matched(tmp_path, a, b)
    assert [turned for *_, turned in pairs(found).values()] == [True, False, False]
    assert found.notes == ["tensors whose axes are merged in one trace are compared flat: activation:fc, activation:q"]


def test_equal_names_of_other_shapes_are_noted(tmp_path):
    found = matched(
        tmp_path, [site("x", drawn(2, 3)), site("y", drawn(5))], [site("x", drawn(3, 2)), site("z", drawn(5))]
    )
    assert pairs(found) == {"activation:y": ("activation:z", "order", False)}
    assert "activation:x [2, 3] and [3, 2]" in found.notes[0]


def test_the_only_output_is_the_first_one(tmp_path):
    a = [site("attn[0]", drawn(2, 3)), site("attn[1]", drawn(2, 2)), site("block", drawn(2, 3))]
    b = [site("attn", drawn(2, 3)), site("block[0]", drawn(2, 3))]
    found = matched(tmp_path, a, b)
    assert {k: v[0] for k, v in pairs(found).items()} == {
        "activation:attn[0]": "activation:attn",
        "activation:block": "activation:block[0]",
    }
    assert [s.name for s in found.unmatched_a] == ["attn[1]"]


def test_outputs_at_two_places_are_not_the_same(tmp_path):
    found = matched(
        tmp_path, [site("m[0]", drawn(2, 2)), site("k", drawn(3))], [site("m[1]", drawn(2, 2)), site("k", drawn(3))]
    )
    assert found.pairs[0].a.name == "m[0]" and found.pairs[0].by == "order"
    found = matched(tmp_path / "2", [site("m[0]", drawn(2, 2))], [site("m[1]", drawn(2, 3))])
    assert not found.pairs and not found.notes


def test_calls(tmp_path):
    a = [site("act", drawn(3), call=i) for i in range(3)]
    found = matched(tmp_path, a, a[:2])
    assert {k: v[0] for k, v in pairs(found).items()} == {k: k for k in ("activation:act", "activation:act#1")}


# --- bits ---


def test_equal_bits_name_modules(tmp_path):
    w, v, zero, g = drawn(8, 4), drawn(4, 4), np.zeros(4, np.float32), drawn(4)
    a = [
        parameter("enc.up.weight", w), parameter("enc.up.bias", np.zeros(8, np.float32)), parameter("enc.q.weight", v),
        parameter("enc.q.bias", zero), parameter("enc.k.bias", zero), parameter("enc.norm.weight", g),
        site("enc.up", drawn(2, 8)), site("enc.q", drawn(2, 4)), site("enc.q", drawn(2, 4), call=1),
    ]  # fmt: skip
    b = [
        parameter("Dense_0/bias", np.zeros(8, np.float32)), parameter("Dense_0/kernel", w.T),
        parameter("Dense_1/bias", zero), parameter("Dense_1/kernel", v.T), parameter("Dense_2/bias", zero),
        parameter("LayerNorm_0/scale", g), site("Dense_1", drawn(2, 4)), site("Dense_1", drawn(2, 4), call=1),
        site("Dense_0", drawn(2, 8)),
    ]  # fmt: skip
    found = matched(tmp_path, a, b)
    assert pairs(found) == {
        "parameter:enc.up.weight": ("parameter:Dense_0/kernel", "bits", True),
        "parameter:enc.up.bias": ("parameter:Dense_0/bias", "bits", False),
        "parameter:enc.q.weight": ("parameter:Dense_1/kernel", "bits", True),
        "parameter:enc.q.bias": ("parameter:Dense_1/bias", "bits", False),
        "parameter:enc.k.bias": ("parameter:Dense_2/bias", "order", False),
        "parameter:enc.norm.weight": ("parameter:LayerNorm_0/scale", "bits", False),
        "activation:enc.up": ("activation:Dense_0", "bits", False),
        "activation:enc.q": ("activation:Dense_1", "bits", False),
        "activation:enc.q#1": ("activation:Dense_1#1", "bits", False),
    }


def test_two_equal_kernels_are_ambiguous(tmp_path):
    w = drawn(6, 4)
    a = [parameter("a.weight", w), parameter("b.weight", w)]
    b = [parameter("x/kernel", w.T), parameter("y/kernel", w.T)]
    found = matched(tmp_path, a, b)
    assert not found.pairs and not found.unmatched_a and not found.unmatched_b
    (each,) = found.ambiguous
    assert each.a == ("parameter:a.weight", "parameter:b.weight")
    assert each.b == ("parameter:x/kernel", "parameter:y/kernel")
    given = rules(tmp_path, {"a.weight": "y/kernel", "b.weight": "x/kernel"})
    found = matched(tmp_path / "mapped", a, b, rules=given)
    assert {k: v[:2] for k, v in pairs(found).items()} == {
        "parameter:a.weight": ("parameter:y/kernel", "map"),
        "parameter:b.weight": ("parameter:x/kernel", "map"),
    }


def test_a_square_kernel_does_not_show_its_transposition(tmp_path):
    """Other values, and names that say nothing: only a map can."""
    w = drawn(4, 4)
    a, b = [parameter("left.mat", w)], [parameter("right/matrix", drawn(4, 4))]
    found = matched(tmp_path / "1", a, b)
    assert not found.pairs and "square" in found.ambiguous[0].why
    for turned in (True, False):
        given = rules(tmp_path, {"left.mat": {"name": "right/matrix", "transposed": turned}})
        found = matched(tmp_path / f"{turned}", a, b, rules=given)
        assert pairs(found) == {"parameter:left.mat": ("parameter:right/matrix", "map", turned)}
    assert (
        "square" in matched(tmp_path / "2", a, b, rules=rules(tmp_path, {"left.mat": "right/matrix"})).ambiguous[0].why
    )
    b = [parameter("right/matrix", w.T)]
    assert pairs(matched(tmp_path / "3", a, b)) == {"parameter:left.mat": ("parameter:right/matrix", "bits", True)}


def test_hashes_alone_match_parameters(tmp_path):
    a, b = [parameter("p.w", drawn(3, 5))], [parameter("q.v", drawn(3, 5))]
    b[0] = b[0]._replace(hash=a[0].hash)
    assert pairs(matched(tmp_path, a, b)) == {"parameter:p.w": ("parameter:q.v", "bits", False)}


def grad(name: str, value: np.ndarray):
    return site(name, value, "parameter_grad")


def test_bits_of_gradients_are_no_evidence(tmp_path):
    w, v, x, y = (drawn(4) for _ in range(4))
    zero = np.zeros(4, np.float32)
    for i, (a, b) in enumerate((((x, y), (y, x)), ((zero, y), (x, zero)))):
        sides = [[parameter("w1", w), parameter("w2", v), grad("w1", g), grad("w2", h)] for g, h in (a, b)]
        found = pairs(matched(tmp_path / str(i), *sides))
        assert {k: by[0] for k, by in found.items()} == {k: k for k in found} and len(found) == 4
    found = matched(
        tmp_path / "kinds", [parameter("a.b", zero), parameter("c", w)], [parameter("c", w), grad("q.w", zero)]
    )
    assert [(p.a.name, p.b.name) for p in found.pairs] == [("c", "c")]


def test_constants_are_no_evidence(tmp_path):
    """A bias of zeros in both models need not be the same one."""
    zero = np.zeros(4, np.float32)
    a = [parameter("enc.k.bias", zero), parameter("enc.q.bias", drawn(4)), site("enc.k", drawn(2, 9))]
    b = [parameter("Dense_0/bias", drawn(4)), parameter("Dense_1/bias", zero), site("Dense_1", drawn(2, 9))]
    found = matched(tmp_path, a + [site("enc.q", drawn(2, 9))], [*b[:2], site("Dense_0", drawn(2, 9)), b[2]])
    assert not any(p.by == "bits" for p in found.pairs)
    assert found.ambiguous[0].a == ("parameter:enc.k.bias", "parameter:enc.q.bias")


# --- order ---


def test_order(tmp_path):
    shapes = [(2, 3), (2, 5), (2, 3), (4,)]
    a = [site(f"a{i}", drawn(*s)) for i, s in enumerate(shapes)]
    b = [site(f"b{i}", drawn(*s)) for i, s in enumerate(shapes[:2] + [(9,)] + shapes[2:])]
    found = matched(tmp_path, a, b)
    assert [(p.a.name, p.b.name, p.by) for p in found.pairs] == [
        ("a0", "b0", "order"), ("a1", "b1", "order"), ("a2", "b3", "order"), ("a3", "b4", "order"),
    ]  # fmt: skip
    assert [s.name for s in found.unmatched_b] == ["b2"]


def test_order_with_several_ways_is_listed(tmp_path):
    a = [site("a0", drawn(2, 3)), site("a1", drawn(2, 3)), site("a2", drawn(7))]
    b = [site("b0", drawn(2, 3)), site("b1", drawn(8))]
    found = matched(tmp_path, a, b)
    assert not found.pairs and [s.name for s in found.unmatched_a] == ["a2"]
    assert found.ambiguous[0].a == ("activation:a0", "activation:a1") and found.ambiguous[0].b == ("activation:b0",)


def test_order_is_kept_between_named_neighbours(tmp_path):
    a = [site(n, drawn(2, 3)) for n in ("left", "in", "a", "mid", "b", "out")]
    b = [site(n, drawn(2, 3)) for n in ("in", "x", "mid", "y", "out")]
    found = pairs(matched(tmp_path, a, b))
    assert found["activation:a"][:2] == ("activation:x", "order")
    assert found["activation:b"][:2] == ("activation:y", "order")
    assert "activation:left" not in found


def test_parameters_of_two_frameworks_have_no_order(tmp_path):
    a = [parameter("x.u", drawn(4)), parameter("y.u", drawn(4)), parameter("z.u", drawn(9))]
    b = [parameter("k.v", drawn(4)), parameter("l.v", drawn(9)), parameter("m.v", drawn(4))]
    found = matched(tmp_path / "1", a, b)
    assert pairs(found) == {"parameter:z.u": ("parameter:l.v", "order", False)}
    assert len(found.ambiguous) == 1
    b = [b[0], b[2], b[1]]
    assert len(matched(tmp_path / "2", a, b, ("torch", "torch")).pairs) == 3


def test_the_whole_model_is_no_layer(tmp_path):
    found = matched(tmp_path, [site("head", drawn(2, 3))], [site("(model)", drawn(2, 3))])
    assert not found.pairs and not found.ambiguous


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_square_kernel_that_flax_flips_is_known_by_its_bits(tmp_path, flipped, swapped):
    """A transposed convolution's; its sizes are those of a convolution's. Its gradient is not compared either."""
    w = drawn(4, 4, 3, 3)
    kernel = np.flip(w.transpose(2, 3, 0, 1), (0, 1)) if flipped else w.transpose(2, 3, 1, 0)
    a, b = (
        [parameter(n, x), site(n, drawn(*x.shape), "parameter_grad"), parameter("up.bias", np.zeros(4, np.float32))]
        for n, x in (("up.weight", w), ("up/kernel", np.ascontiguousarray(kernel)))
    )
    given = (b, a, ("jax", "torch")) if swapped else (a, b)
    found = matched(tmp_path, *given)
    assert len(found.pairs) == (1 if flipped else 3) and not found.differs
    assert len(found.unmatched_a) == 2 * flipped and any("held otherwise" in n for n in found.notes) == flipped


# --- gradients ---


def test_gradients_follow(tmp_path):
    w = drawn(6, 4)
    a = [parameter("a.weight", w), site("a", drawn(2, 6)), site("a", drawn(2, 6), "activation_grad"),
         site("a.weight", drawn(6, 4), "parameter_grad")]  # fmt: skip
    b = [parameter("b/kernel", w.T), site("b", drawn(2, 6)), site("b", drawn(2, 6), "activation_grad"),
         site("b/kernel", drawn(4, 6), "parameter_grad")]  # fmt: skip
    found = pairs(matched(tmp_path, a, b))
    assert found["activation_grad:a"] == ("activation_grad:b", "bits", False)
    assert found["parameter_grad:a.weight"] == ("parameter_grad:b/kernel", "bits", True)


def test_the_gradient_of_a_tensor_at_several_places_is_in_parts(tmp_path):
    """A cell of torch returns h, and one of flax (h, h): h's gradient is the sum of those at both places."""
    h, c = drawn(2, 3), drawn(2, 3)
    lone = [site("gru", h), site("gru", drawn(2, 3), "activation_grad")]
    for other, ambiguous in ((h, 1), (c, 0)):
        several = [site("gru[0]", h), site("gru[1]", other)]
        several += [site(f"gru[{i}]", drawn(2, 3), "activation_grad") for i in range(2)]
        for n, (a, b) in enumerate(((lone, several), (several, lone))):
            found = matched(tmp_path / f"{ambiguous}{n}", a, b)
            assert len(found.pairs) == 2 - ambiguous and len(found.ambiguous) == ambiguous
            if ambiguous:
                keys = {"activation_grad:gru", "activation_grad:gru[0]", "activation_grad:gru[1]"}
                assert {*found.ambiguous[0].a, *found.ambiguous[0].b} == keys


def test_places_of_other_structures_say_nothing(tmp_path):
    """torch's LSTM cell returns (h, c), and flax's ((c, h), h)."""
    h, c = drawn(2, 3), drawn(2, 3)
    a = [site("lstm[0]", h), site("lstm[1]", c)]
    b = [site("lstm[0][0]", c), site("lstm[0][1]", h), site("lstm[1]", h)]
    assert not matched(tmp_path / "1", a, b).pairs
    assert len(matched(tmp_path / "2", a, [site("lstm[0]", h), site("lstm[1]", c)]).pairs) == 2


def test_gradients_alone_are_matched_by_names(tmp_path):
    a, b = [site("h.0", drawn(2), "activation_grad")], [site("h_0", drawn(2), "activation_grad")]
    assert pairs(matched(tmp_path, a, b)) == {"activation_grad:h.0": ("activation_grad:h_0", "table", False)}


def test_gradients_of_ambiguous_tensors_are_listed_with_them(tmp_path):
    kinds = ("activation", "activation_grad")
    a = [site(n, drawn(2), kind) for kind in kinds for n in "ab"]
    b = [site(n, drawn(2), kind) for kind in kinds for n in "c"]
    found = matched(tmp_path, a, b)
    assert not found.pairs and not found.unmatched_a and not found.unmatched_b
    assert len(found.ambiguous[0].a) == 4 and found.ambiguous[0].b == ("activation:c", "activation_grad:c")


# --- maps ---


def test_a_map_comes_first(tmp_path):
    a = [site(n, drawn(3)) for n in ("x", "y")]
    given = rules(tmp_path, {"x": "y", "y": "x"})
    assert pairs(matched(tmp_path, a, a, rules=given)) == {
        "activation:x": ("activation:y", "map", False),
        "activation:y": ("activation:x", "map", False),
    }


def test_patterns_of_a_map(tmp_path):
    a = [site(f"h.{i}.mlp", drawn(3)) for i in range(3)] + [
        parameter(f"h.{i}.mlp.fc.weight", drawn(5, 3)) for i in range(3)
    ]
    b = [site(f"B{i}/ffn", drawn(3)) for i in range(3)] + [
        parameter(f"B{i}/ffn/fc/weight", drawn(3, 5)) for i in range(3)
    ]
    found = pairs(matched(tmp_path, a, b, rules=rules(tmp_path, {"h.*.mlp**": "B*/ffn**"})))
    assert {(a.rpartition("h.")[2][0], b.partition("B")[2][0], by) for a, (b, by, _) in found.items()} == {
        (str(i), str(i), "map") for i in range(3)
    }
    assert sum(turned for *_, turned in found.values()) == 3


def test_maps_that_contradict_the_traces(tmp_path):
    a, b = [site("x", drawn(3))], [site("y", drawn(4))]
    for i, (given, named) in enumerate(
        (({"x": "y"}, "does not hold"), ({"z": "y"}, "no name of A"), ({"x": "z"}, "B has no 'z'"))
    ):
        with pytest.raises(DiffError, match=named):
            matched(tmp_path / str(i), a, b, rules=rules(tmp_path, given))
    p, q = [parameter("x", drawn(3, 2))], [parameter("y", drawn(3, 2))]
    given = rules(tmp_path, {"x": {"name": "y", "transposed": True}})
    with pytest.raises(DiffError, match="does not hold it with transposed True"):
        matched(tmp_path / "p", p, q, rules=given)
