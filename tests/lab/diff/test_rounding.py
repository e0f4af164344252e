"""R of rounding alone, over 16 runs of a small transformer whose input is moved by one ulp; and faults beside it."""

import numpy as np
import pytest
import tiny_model
import torch
from diff_tools import firsts, trace

from diptych.lab.diff import differ
from diptych.lab.traces import Trace

RUNS = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounding")
    given = tiny_model.parameters()

    def make(name: str, dtype: torch.dtype, parameters=given, **options) -> Trace:
        return trace(folder / name, tiny_model.run(parameters, dtype, **options))

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = {"a": make("a", torch.float32), "h": make("h", torch.float64)}
    yield given, made, make
    torch.set_num_threads(threads)


def test_rounding_stays_below_two(run):
    given, made, make = run
    noise, verdicts = [], set()
    for seed in range(RUNS):
        moved = given | {"x": tiny_model.moved({"x": given["x"]}, seed)["x"]}
        result = differ.diff(made["a"], make(f"b{seed}", torch.float32, moved), [made["h"]])
        noise += [(row.cells[0].noise, np.prod(row.shape), row.a) for row in result.rows]
        verdicts |= {cell.verdict for row in result.rows for cell in row.cells}
    assert len(noise) == RUNS * len(result.rows) and verdicts <= {"same", "rounding"}
    large = [r for r, size, _ in noise if size >= 100]
    assert max(large) < 2 and sum(r > 1 for r in large) > RUNS  # the runs do differ from A
    assert np.mean([r > 2 for r, *_ in noise]) < 0.01


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_other_orders_of_sums_are_rounding(run, chunks):
    _, made, make = run
    b = make(f"c{chunks}", torch.float32, chunks=chunks)
    h_b = make(f"hc{chunks}", torch.float64, chunks=chunks)
    result = differ.diff(made["a"], b, [made["h"], h_b])
    found = {cell.verdict for row in result.rows for cell in row.cells}
    assert result.status == "green" and found == {"same", "rounding"}


@pytest.mark.parametrize("fault", tiny_model.FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_faults_are_found_where_they_are(run, fault, dtype):
    _, made, make = run
    name = f"{fault}-{str(dtype)[6:]}"
    a = make(f"a-{name}", dtype)
    b, h_b = make(name, dtype, fault=fault), make(f"h-{name}", torch.float64, fault=fault)
    result = differ.diff(a, b, [made["h"], h_b])
    assert firsts(result)[0] == (f"activation:{tiny_model.FAULTS[fault]}", "definition")
    assert all(kind.startswith("activation:") for kind, _ in firsts(result)) and len(result.first) == 1


def test_a_coarser_precision_is_beyond_rounding(run):
    _, made, make = run
    result = differ.diff(made["a"], make("bfloat16", torch.bfloat16), [made["h"], made["h"]])
    assert result.status == "differs" and {v for _, v in firsts(result)} == {"beyond"}
