"""Whole comparisons: steps, ranks, references, values that are missing, and where traces part."""

import dataclasses

import numpy as np
import pytest
from diff_tools import compared, firsts, parameter, site, trace
from trace_tools import few, meta, rng

from diptych.lab.diff import differ, mapping
from diptych.lab.diff.result import DiffError, Result
from diptych.lab.traces import Options, Trace, TraceError, Writer, distance
from diptych.lab.traces.schema import dump, load

HASHES = Options(values="hash")
SAMPLES = Options(values="sample")


def chain(*values: float, names: str = "abcdefg", linked: bool = True) -> list:
    """Sites of one number each, every one computed from the one before."""
    return [
        site(n, np.full(200, v, np.float32), inputs=((f"activation:{p}",) if p else ()) if linked else None)
        for n, p, v in zip(names, ["", *names], values, strict=False)
    ]


def cells(result: Result, name: str) -> list[str]:
    return [c.verdict for row in result.rows if row.name == name for c in row.cells]


def test_equal_traces(tmp_path):
    steps = few(rng("equal"), 3)
    result = compared(tmp_path, steps, steps)
    assert result.status == "green" and result.steps == (0, 1, 2) and not result.first
    assert {c.verdict for row in result.rows for c in row.cells} == {"same"}
    assert all([c.step for c in row.cells] == [0, 1, 2] for row in result.rows)
    assert result.notes == () and [s.role for s in result.sides] == ["A", "B"]


def test_cells_are_distances(tmp_path):
    gen = rng("cells")
    x = gen.standard_normal((40, 8)).astype(np.float32)
    y = x + (gen.random(x.shape) < 0.5) * np.float32(1e-5)
    result = compared(tmp_path, [[site("x", x)]], [[site("x", y)]])
    a, b = (Trace.open(tmp_path / n).ranks[0].step(0)[0] for n in "ab")
    want, cell = distance(a, b), result.rows[0].cells[0]
    assert (cell.max_ulp, cell.differing, cell.compared) == (want.max_ulp, want.differing, 320)
    assert cell.relative == want.relative and cell.verdict == "differs" and result.status == "differs"


def test_the_result_is_json(tmp_path):
    result = compared(tmp_path, few(rng("json", 1)), few(rng("json", 2)))
    assert load(Result, dump(result), "result") == result


# --- the first difference ---


def test_first_is_without_a_differing_ancestor(tmp_path):
    result = compared(tmp_path, [chain(1, 2, 3, 4)], [chain(1, 9, 3, 9)])
    assert firsts(result) == [("activation:b", "differs")]
    assert [row.inputs for row in result.rows] == [(), (0,), (1,), (2,)]


def test_two_first_differences(tmp_path):
    def step(b: float, c: float) -> list:
        x = [np.full(3, v, np.float32) for v in (1, b, c, b + c)]
        return [
            site("a", x[0], inputs=()), site("b", x[1], inputs=("activation:a",)),
            site("c", x[2], inputs=("activation:a",)), site("d", x[3], inputs=("activation:b", "activation:c")),
        ]  # fmt: skip

    assert [n for n, _ in firsts(compared(tmp_path, [step(1, 2)], [step(3, 4)]))] == ["activation:b", "activation:c"]


def test_order_stands_for_unknown_inputs(tmp_path):
    result = compared(tmp_path, [chain(1, 2, 3, linked=False)], [chain(1, 9, 9, linked=False)])
    assert firsts(result) == [("activation:b", "differs")]
    assert {row.inputs for row in result.rows} == {None}


def test_a_tensor_without_known_inputs_may_be_an_input_that_is_not_listed(tmp_path):
    """A frozen encoder's output has no gradient, so sites computed from it do not list it."""

    def step(frozen: float, read: float) -> list:
        return [
            site("frozen", np.full(3, frozen, np.float32)),
            *(site(n, np.full(3, read, np.float32), inputs=()) for n in ("kv.0", "kv.1")),
        ]

    assert firsts(compared(tmp_path / "1", [step(1, 1)], [step(2, 2)])) == [("activation:frozen", "differs")]
    found = firsts(compared(tmp_path / "2", [step(1, 1)], [step(1, 2)]))  # what agrees explains nothing
    assert found == [("activation:kv.0", "differs"), ("activation:kv.1", "differs")]


def test_ancestors_through_sites_that_are_not_matched(tmp_path):
    """The site between is in A alone."""
    b = chain(1, 9, 3, 9)
    del b[2]
    b[2] = b[2]._replace(site=dataclasses.replace(b[2].site, inputs=("activation:b",)))
    result = compared(tmp_path, [chain(1, 2, 3, 4)], [b])
    assert firsts(result) == [("activation:b", "differs")] and result.unmatched_a == ("activation:c",)
    assert [row.inputs for row in result.rows] == [(), (0,), (1,)]


def test_forward_before_backward_and_the_first_step(tmp_path):
    def step(forward: float, backward: float) -> list:
        return [
            site("g", np.full(3, backward, np.float32), "activation_grad", inputs=()),
            site("f", np.full(3, forward, np.float32), inputs=()),
        ]

    result = compared(tmp_path, [step(1, 1), step(1, 1), step(1, 1)], [step(1, 1), step(2, 2), step(9, 9)])
    assert firsts(result) == [("activation:f", "differs"), ("activation_grad:g", "differs")]
    assert {f.step for f in result.first} == {1}


def test_parameters_have_no_ancestors_in_a_step(tmp_path):
    def step(v: float) -> list:
        return [parameter("p", np.full(3, v, np.float32)), parameter("q", np.full(3, v, np.float32)), *chain(v)]

    found = firsts(compared(tmp_path, [step(1)], [step(2)]))
    assert [n for n, _ in found] == ["parameter:p", "parameter:q", "activation:a"]  # a says that it has no inputs


# --- steps and ranks ---


def test_common_steps(tmp_path):
    a, b = [chain(1, 2)] * 5, [chain(1, 2)] * 3
    result = compared(tmp_path, a, b)
    assert result.steps == (0, 1, 2) and "2 of its 5 steps" in result.notes[0]
    traces = [Trace.open(tmp_path / n) for n in "ab"]
    assert differ.diff(traces[0], traces[1], steps=[2, 0, 2]).steps == (0, 2)
    with pytest.raises(DiffError, match="step 3 is not in both traces, which have 3 steps from 0 to 2"):
        differ.diff(traces[0], traces[1], steps=[1, 3])


def test_no_common_step(tmp_path):
    a = trace(tmp_path / "a", chain(1))
    with Writer(tmp_path / "b", meta()) as writer:
        writer.step(7, chain(1))
    with pytest.raises(DiffError, match=r"no step is in both traces: .* has step 0, .* has step 7"):
        differ.diff(a, Trace.open(tmp_path / "b"))
    with pytest.raises(DiffError, match=r"c: no step was recorded(?m:$)"):
        differ.diff(trace(tmp_path / "c"), a)
    for ranks, said in ((2, "no step was recorded by rank 1 of 2"), (3, "by ranks 1, 2 of 3")):
        with pytest.raises(DiffError, match=said):
            differ.diff(trace(tmp_path / f"of {ranks}", chain(1), ranks=ranks), a)


def test_a_step_that_was_interrupted(tmp_path):
    a = trace(tmp_path / "a", chain(1), chain(2))
    trace(tmp_path / "b", chain(1), chain(3))
    lines = tmp_path / "b" / "rank0" / "steps.jsonl"
    lines.write_bytes(lines.read_bytes()[:-5])
    result = differ.diff(a, Trace.open(tmp_path / "b"))
    assert result.status == "green" and result.steps == (0,)
    assert "rank 0 was interrupted within a step" in result.notes[0]


def test_ranks(tmp_path):
    for name, values in (("a", (1, 1)), ("b", (1, 5))):
        for rank, value in enumerate(values):
            with Writer(tmp_path / name, meta(ranks=2), rank) as writer:
                writer.step(0, chain(1, value))
    a, b = (Trace.open(tmp_path / n) for n in "ab")
    result = differ.diff(a, b)
    assert [(row.rank, row.name, row.cells[0].verdict) for row in result.rows] == [
        (0, "a", "same"), (0, "b", "same"), (1, "a", "same"), (1, "b", "differs"),
    ]  # fmt: skip
    assert [row.inputs for row in result.rows] == [(), (0,), (), (2,)]
    with pytest.raises(DiffError, match=r"2 ranks, .* has 1"):
        differ.diff(a, trace(tmp_path / "c", chain(1)))


def test_sites_of_some_steps_and_shapes_that_change(tmp_path):
    a = [[site("x", np.ones(6, np.float32))], [site("x", np.ones(6, np.float32)), site("y", np.ones(2, np.float32))]]
    b = [a[0], [site("x", np.ones(4, np.float32)), a[1][1]]]
    result = compared(tmp_path, a, b)
    assert cells(result, "x") == ["same", "differs"] and cells(result, "y") == ["same"]
    assert firsts(result) == [("activation:x", "differs")]
    assert result.rows[0].cells[1].compared == 0


def test_pairs_that_no_step_has(tmp_path):
    x, y = [site("x", np.ones(3))], [site("y", np.ones(4))]
    with pytest.raises(DiffError, match="nothing can be said: no step has a matched site in both traces"):
        compared(tmp_path, [x, y], [[site("z", np.ones(9))], x])


def test_nothing_in_common(tmp_path):
    with pytest.raises(DiffError, match=r"no site of .* was matched"):
        compared(tmp_path, [[site("x", np.ones(3))]], [[site("y", np.ones(4))]])


# --- values that are missing ---


def test_hashes_alone(tmp_path):
    steps = [chain(1, 2)], [chain(1, 3)]
    a, b = (trace(tmp_path / n, *s, options=HASHES) for n, s in zip("ab", steps, strict=True))
    result = differ.diff(a, b)
    assert cells(result, "a") == ["same"] and cells(result, "b") == ["differs"]
    assert result.rows[1].cells[0].relative is None
    c = trace(tmp_path / "c", *steps[1], options=HASHES, hash="other")
    with pytest.raises(DiffError, match="nothing can be said"):
        differ.diff(a, c)


def test_hashes_of_two_functions_beside_values(tmp_path):
    a, b = trace(tmp_path / "a", chain(1, 2)), trace(tmp_path / "b", chain(1, 2), hash="other")
    result = differ.diff(a, b)
    assert result.status == "green" and "hashes are not compared: they are blake2b-128 and other" in result.notes


def test_samples_of_transposed_tensors_are_unknown(tmp_path):
    w = rng("sample").standard_normal((64, 40)).astype(np.float32)
    steps = ([parameter("a.weight", w), *chain(1)], [parameter("a/kernel", w.T), *chain(1)])
    for options, want in ((SAMPLES, "unknown"), (Options(values="full"), "same")):
        a, b = (
            trace(tmp_path / options.values / n, s, options=options, framework=f)
            for n, s, f in zip("ab", steps, ("torch", "jax"), strict=True)
        )
        result = differ.diff(a, b)
        assert result.rows[0].transposed and cells(result, "a.weight") == [want]
        assert any("a transposed tensor is compared whole" in n for n in result.notes) == (want == "unknown")
        assert result.status == "green"


def test_samples_of_merged_axes_are_at_equal_places(tmp_path):
    x = rng("merged").standard_normal((8, 16, 32)).astype(np.float32)
    y = x + np.float32(1e-3)
    a, b = (trace(tmp_path / n, [site("x", v)], options=SAMPLES) for n, v in (("a", x), ("b", y.reshape(128, 32))))
    cell = differ.diff(a, b).rows[0].cells[0]
    assert cell.compared == cell.differing == 1024 and cell.relative == pytest.approx(1e-3, rel=0.1)


def test_values_of_other_elements_are_named(tmp_path):
    h = rng("elements").standard_normal(5000)
    values = (h.astype(np.float32), (1.001 * h).astype(np.float32), h, h)
    kept = (Options(values="full"), SAMPLES) * 2
    a, b, h_a, h_b = (
        trace(tmp_path / n, [site("x", v)], options=o)
        for n, v, o in zip(("a", "b", "ha", "hb"), values, kept, strict=True)
    )
    result = differ.diff(a, b, [h_a, h_b])
    assert cells(result, "x") == ["unknown"] and result.status == "differs" and "other elements" in result.notes[0]


def test_long_chains_between_pairs(tmp_path):
    """Sites of A alone, each computed from the one before and a parameter: the pair behind them knows all of these."""
    count = 300
    start = [parameter(f"p{i}", np.ones(i % 7 + 1)) for i in range(count)]

    def step(name: str, shape: int) -> list:
        found = list(start)
        for i in range(count):
            inputs = (f"parameter:p{i}", *([f"activation:{name}{i - 1}"] if i else []))
            found.append(site(f"{name}{i}", np.ones(shape), inputs=inputs))
        return [*found, site("out", np.ones(9), inputs=(f"activation:{name}{count - 1}",))]

    result = compared(tmp_path, [step("a", 11)], [step("b", 12)])
    assert result.rows[-1].name == "out" and result.rows[-1].inputs == tuple(range(count))


def test_damaged_values(tmp_path):
    a, b = trace(tmp_path / "a", chain(1)), trace(tmp_path / "b", chain(2))
    (tmp_path / "b" / "rank0" / "step-00000.safetensors").unlink()
    with pytest.raises(TraceError, match=r"step-00000\.safetensors: cannot be read"):
        differ.diff(a, b)


# --- references ---


def referenced(tmp_path, wrong: float = 0.0, transposed: bool = False):
    """A and B in float32 and their references; B's weight is transposed, and its output wrong."""
    w, x = (rng("references", i).standard_normal((50, 50)).astype(np.float32) for i in range(2))
    found = []
    for name, dtype, right, jax in (
        ("a", "f4", 0, 0),
        ("ha", "f8", 0, 0),
        ("b", "f4", wrong, 1),
        ("hb", "f8", wrong, 1),
    ):
        v, y = w.astype(dtype), x.astype(dtype)
        out = y @ v.T if not jax else sum(y[:, i : i + 10] @ v.T[i : i + 10] for i in range(0, 50, 10))
        named = parameter("l/kernel" if jax else "l.weight", v.T if jax else v)
        found.append(trace(tmp_path / name, [named, site("l", out * np.dtype(dtype).type(1 + right))],
                           framework="jax" if jax else "torch"))  # fmt: skip
    return found


@pytest.mark.parametrize(("wrong", "want"), [(0.0, "rounding"), (1e-6, "definition"), (1e-12, "rounding")])
def test_two_references(tmp_path, wrong, want):
    a, h_a, b, h_b = referenced(tmp_path, wrong)
    result = differ.diff(a, b, [h_a, h_b])
    assert [s.role for s in result.sides] == ["A", "B", "H_A", "H_B"]
    assert [row.cells[0].verdict for row in result.rows] == ["same", want]
    out = [t.ranks[0].step(0)[1].values.tensor for t in (a, h_a, b, h_b)]
    a_, h_a_, b_, h_b_ = (t.bits.view(f"f{t.dtype.nbytes}").astype(float) for t in out)

    def root(x):
        return np.sqrt(np.mean(x**2))

    noise = root(b_ - h_b_) / max(root(a_ - h_a_), 2**-24 * root(h_a_))
    assert result.rows[1].cells[0].noise == pytest.approx(noise, rel=1e-9)
    assert result.rows[1].cells[0].definition == pytest.approx(root(h_b_ - h_a_) / root(h_a_), rel=1e-6, abs=1e-300)
    assert firsts(result) == ([("activation:l", "definition")] if want == "definition" else [])


def test_rounding_before_it_hides_no_definition(tmp_path):
    """A site that is beyond rounding is listed too, behind the one that differs by definition."""
    h = rng("hidden").standard_normal(64)
    rounded = lambda times: (h * (1 + times * rng("hidden", times).standard_normal(64) * 2**-24)).astype("f4")  # noqa: E731
    a, b, h_a, h_b = (
        trace(tmp_path / name, [site("a", x), site("b", y, inputs=("activation:a",))])
        for name, x, y in (
            ("a", rounded(1), h.astype("f4")), ("b", rounded(9), (2 * h).astype("f4")), ("ha", h, h), ("hb", h, 2 * h)
        )
    )  # fmt: skip
    assert firsts(differ.diff(a, b, [h_a, h_b])) == [("activation:b", "definition"), ("activation:a", "beyond")]
    assert firsts(differ.diff(a, b, [h_a])) == [("activation:a", "beyond")]


def test_exact_zeros_are_no_errors_to_take_a_mean_of(tmp_path):
    """Three errors may be five times three others; that 93 zeros have none does not change it."""
    h = np.array([1.0, 1.0, 1.0])
    ulp = np.array([2.0**-23, 2.0**-23, 2.0**-23])
    for zeros in (0, 93):
        a, b, h_a = (
            trace(tmp_path / f"{name} {zeros}", [site("x", np.append(x, np.zeros(zeros)).astype(dtype))])
            for name, x, dtype in (("a", h + ulp, "f4"), ("b", h + 5 * ulp, "f4"), ("h", h, "f8"))
        )
        assert cells(differ.diff(a, b, [h_a]), "x") == ["rounding"]


@pytest.mark.parametrize("side", [1, 3])
def test_one_reference_of_either_side(tmp_path, side):
    traces = referenced(tmp_path, 0.01)
    result = differ.diff(traces[0], traces[2], [traces[side]])
    weight, out = (row.cells[0] for row in result.rows)
    assert (weight.verdict, weight.noise) == ("same", 0) and result.rows[0].transposed
    assert out.definition is None and out.noise is not None
    assert out.verdict == "beyond" if side == 1 else out.noise < 1  # A is wrong against B's reference
    assert result.sides[2].role == "H"


def test_sites_that_a_reference_lacks(tmp_path):
    a, h_a, b, _ = referenced(tmp_path)
    short = trace(tmp_path / "short", [parameter("l.weight", np.ones((50, 50)))])
    result = differ.diff(a, b, [h_a, short])
    assert cells(result, "l") == ["unknown"] and result.status == "differs" and not result.first
    assert "1 cell is unknown: no reference has the site in float64" in result.notes


def test_steps_and_ranks_that_no_reference_has(tmp_path):
    h = rng("lacks").standard_normal(200)
    x, far = [site("x", h.astype(np.float32))], [site("x", (9 * h).astype(np.float32))]
    h_a, h_b = (trace(tmp_path / n, [site("x", h)]) for n in ("ha", "hb"))
    result = compared(tmp_path, [x, x, x], [x, x, far], references=[h_a, h_b])
    assert cells(result, "x") == ["same", "same", "differs"] and result.status == "differs"
    for name, second in (("c", x), ("d", far)):
        for rank, entries in enumerate((x, second)):
            with Writer(tmp_path / name, meta(ranks=2), rank) as writer:
                writer.step(0, entries)
    result = differ.diff(*(Trace.open(tmp_path / n) for n in "cd"), [h_a, h_b])
    assert cells(result, "x") == ["same", "differs"] and [f.row for f in result.first] == [1]


def test_one_reference_is_of_the_side_whose_sites_it_has(tmp_path):
    (tmp_path / "map.json").write_text('{"l.1": "l.2", "l.2": "l.3"}')
    x, y = (rng("side", i).standard_normal(200) for i in range(2))
    a = trace(tmp_path / "a", [site("l.1", x.astype(np.float32)), site("l.2", y.astype(np.float32))])
    b = trace(tmp_path / "b", [site("l.2", x.astype(np.float32)), site("l.3", (1.5 * y).astype(np.float32))])
    rules = mapping.read(tmp_path / "map.json")
    h_b = trace(tmp_path / "hb", [site("l.2", x), site("l.3", y)])
    result = differ.diff(a, b, [h_b], rules)
    assert firsts(result) == [("activation:l.2", "beyond")]
    half = trace(tmp_path / "half", [site("l.2", x)])
    with pytest.raises(DiffError, match="give one trace of either, --ref H_A H_B"):
        differ.diff(a, b, [half], rules)


def test_sites_that_a_later_step_adds_keep_their_order(tmp_path):
    a = [chain(1, names="z", linked=False), chain(2, 3, names="yz", linked=False)]
    b = [a[0], chain(4, 5, names="yz", linked=False)]
    result = compared(tmp_path, a, b)
    assert [row.name for row in result.rows] == ["y", "z"] and firsts(result) == [("activation:y", "differs")]


def test_a_map_is_checked_over_all_ranks(tmp_path):
    for name in "ab":
        for rank in range(2):
            with Writer(tmp_path / name, meta(ranks=2), rank) as writer:
                writer.step(0, chain(1, names=f"{'xy'[rank]}") if rank else chain(1, names=name))
    (tmp_path / "map.json").write_text('{"a": "b"}')
    result = differ.diff(*(Trace.open(tmp_path / n) for n in "ab"), rules=mapping.read(tmp_path / "map.json"))
    assert [(row.a, row.b) for row in result.rows] == [("activation:a", "activation:b"), ("activation:y",) * 2]


def test_sites_of_other_shapes_are_a_finding(tmp_path):
    def step(width: int) -> list:
        return [*chain(1), *(site(f"h.{i}", np.zeros((2, width))) for i in range(9))]

    result = compared(tmp_path, [step(3)], [step(4)])
    assert result.status == "differs" and not result.first
    assert len(result.unmatched_a) == len(result.unmatched_b) == 9 and "other shapes" in result.notes[0]


def test_a_leading_axis_that_is_broadcast_is_none(tmp_path):
    result = compared(
        tmp_path, [[*chain(1), site("wpe", np.ones((1, 3, 4)))]], [[*chain(1), site("wpe", np.ones((2, 3, 4)))]]
    )
    assert result.status == "green" and result.unmatched_a == result.unmatched_b == ("activation:wpe",)
    assert "activation:wpe [1, 3, 4] and [2, 3, 4]" in result.notes[0]


def test_references_must_be_float64(tmp_path):
    a, h_a, b, _ = referenced(tmp_path)
    result = differ.diff(a, b, [h_a, b])
    assert cells(result, "l") == ["unknown"] and cells(result, "l.weight") == ["same"]
    assert any("no reference has the site in float64" in n for n in result.notes)
