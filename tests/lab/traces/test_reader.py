"""Reading traces: several ranks, killed runs, and folders that no writer made."""

import json
import shutil

import numpy as np
import pytest
from trace_tools import entry, few, meta, rng, write

from diptych.lab.traces import Options, Tensor, Trace, TraceError, Writer
from diptych.lab.traces.tensor_file import write as write_tensors
from lab_files import SPECIAL, make


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "t", few(rng("reader"), 3))


def read_all(folder) -> None:
    """Reads all that a trace has."""
    trace = Trace.open(folder)
    for rank in trace.ranks.values():
        for step in rank.steps:
            for observation in rank.step(step):
                if observation.values is not None:
                    np.array(observation.values.tensor.bits)


def edited(folder, edit, line: int = 0) -> None:
    """Changes a line of steps.jsonl by a function of its parsed JSON."""
    path = folder / "rank0/steps.jsonl"
    lines = path.read_text().splitlines()
    plain = json.loads(lines[line])
    edit(plain)
    lines[line] = json.dumps(plain)
    path.write_text("\n".join(lines) + "\n")


def test_steps_are_those_that_all_ranks_have(tmp_path):
    for rank, steps in ((0, 3), (2, 2)):
        with Writer(tmp_path / "t", meta(ranks=3), rank) as writer:
            for number, entries in enumerate(few(rng(rank), steps)):
                writer.step(number, entries)
    trace = Trace.open(tmp_path / "t")
    assert list(trace.ranks) == [0, 2] and trace.steps == []  # rank 1 was killed before it began
    with Writer(tmp_path / "t", meta(ranks=3), 1) as writer:
        writer.step(1, few(rng())[0])
    trace = Trace.open(tmp_path / "t")
    assert trace.steps == [1] and [r.steps for r in trace.ranks.values()] == [[0, 1, 2], [1], [0, 1]]
    with pytest.raises(KeyError):
        trace.ranks[1].step(0)


def test_a_run_that_was_killed_early_loads(tmp_path):
    Writer(tmp_path / "t", meta()).close()
    assert Trace.open(tmp_path / "t").steps == []
    (tmp_path / "t/rank0/steps.jsonl").unlink()
    (tmp_path / "t/rank0/.step-00000.safetensors.0123456789abcdef.partial").write_text("half")
    assert Trace.open(tmp_path / "t").steps == []
    (tmp_path / "t/rank0/.step-00000.safetensors.0123456789abcdef.partial").unlink()
    (tmp_path / "t/rank0").rmdir()
    trace = Trace.open(tmp_path / "t")
    assert trace.ranks == {} and trace.steps == []


def test_a_trace_may_be_reached_through_a_link(tmp_path, folder):
    (tmp_path / "link").symlink_to(folder)
    assert Trace.open(str(tmp_path / "link")).steps == [0, 1, 2]


def test_other_files_are_none_of_the_traces(folder):
    for name in ("notes.txt", "rank00", "rank1x", "rankx", "rank0/more.json"):
        (folder / name).write_text("x")
    read_all(folder)


def test_more_steps_than_open_files(tmp_path):
    made = [[entry("x", np.full(3, n, np.uint32), "float32")] for n in range(40)]
    rank = Trace.open(write(tmp_path / "t", made)).ranks[0]
    tensors = [r.values.tensor.bits for n in range(40) for r in rank.step(n) if r.values]
    assert [int(t[0]) for t in tensors] == list(range(40))
    assert len(rank._mapped) == 8


@pytest.mark.parametrize("what", ["nothing", *SPECIAL])
@pytest.mark.parametrize("name", ["meta.json", "rank0/steps.jsonl", "rank0/step-00001.safetensors", "rank0"])
def test_what_is_no_file_or_folder_is_refused(folder, name, what):
    (shutil.rmtree if name == "rank0" else type(folder).unlink)(folder / name)
    make(folder / name, what)
    may_be_missing = what == "nothing" and name in ("rank0", "rank0/steps.jsonl")
    if may_be_missing or (name, what) == ("rank0", "a folder"):
        return read_all(folder)
    with pytest.raises(TraceError, match=rf"{name}: (cannot be read|is a )"):
        read_all(folder)


@pytest.mark.parametrize("name", ["meta.json", "rank0/steps.jsonl", "rank0/step-00001.safetensors", "rank0"])
def test_links_inside_of_a_trace_are_refused(tmp_path, folder, name):
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TraceError, match=rf"{name}: .*is a link"):
        read_all(folder)


def test_a_folder_without_a_trace(tmp_path):
    for path in (tmp_path, tmp_path / "none", make(tmp_path / "pipe", "a named pipe")):
        with pytest.raises(TraceError, match=r"meta.json: cannot be read"):
            Trace.open(path)


def test_a_rank_too_many(folder):
    (folder / "rank1").mkdir()
    with pytest.raises(TraceError, match=r"t/rank1: .*meta.json says that ranks are 0 to 0"):
        Trace.open(folder)


def test_a_truncated_meta_is_refused_wherever_it_ends(folder):
    text = (folder / "meta.json").read_bytes()
    for end in range(len(text) - 1):
        (folder / "meta.json").write_bytes(text[:end])
        with pytest.raises(TraceError, match=r"meta.json: is no JSON"):
            Trace.open(folder)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda s: s.update(step=0), r"line 2: step: 0 does not follow step 0"),
        (lambda s: s.update(step=7), r"line 3: step: 2 does not follow step 7"),
        (lambda s: s["records"][0].update(site=99), r"line 2: records\[0\].site: is 99, there are"),
        (lambda s: s["records"].append(s["records"][0]), r"line 2: records\[5\].site: activation:.* has two"),
        (lambda s: s["records"][0].update(count=36), r"line 2: records\[0\].count: is 36 of 35 elements"),
        (lambda s: s["records"][0].update(values="sampled", count=0), r"records\[0\].count: is 0 of 35 elements"),
        (lambda s: s["records"][0].update(count=34), r"line 2: records\[0\].count: is 34 of 35 elements"),
        (lambda s: s["records"][0].update(hash=None, values="most"), r"line 2: records\[0\].values: must be one of"),
        (lambda s: s["records"][0].update(file="../../x"), r"line 2: records\[0\]: has an unknown field 'file'"),
        (lambda s: s["records"].pop(), r"tensor 'activation:layer.int32': is not in steps.jsonl"),
        (lambda s: s["records"][0].update(values="sampled", count=9), r"is float32\[5, 7\], .* says float32\[9\]"),
        (lambda s: s["records"][0].update(values="none", count=0), "'activation:layer.float32': is not in steps.jsonl"),
    ],
)  # fmt: skip
def test_a_hostile_step_is_refused(folder, edit, why):
    edited(folder, edit, line=1)
    with pytest.raises(TraceError, match=f"rank0/.*{why}"):
        read_all(folder)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "int32"}, r"tensor 'activation:layer.float32': is float32\[5, 7\], steps.jsonl says int32"),
        ({"shape": [7, 5]}, r"is float32\[5, 7\], steps.jsonl says float32\[7, 5\]"),
        ({"name": "a/../b"}, r"line 1: sites\[0\]: name: must have no part"),
        ({"inputs": ["activation:layer.float32"]}, "has an input 'activation:layer.float32', not recorded before"),
        ({"inputs": ["result:none"]}, "has an input 'result:none', not recorded before"),
    ],
)
def test_a_hostile_site_is_refused(folder, changes, why):
    edited(folder, lambda s: s["sites"][0].update(changes))
    with pytest.raises(TraceError, match=f"rank0/.*{why}"):
        read_all(folder)


def test_a_step_with_the_values_of_another_is_refused(folder):
    a, b = folder / "rank0/step-00000.safetensors", folder / "rank0/step-00001.safetensors"
    write_tensors(b, {"x": Tensor.of(np.zeros(3))})
    with pytest.raises(TraceError, match=r"step-00001.safetensors: tensor '.*': is missing; steps.jsonl has it"):
        read_all(folder)
    a.unlink()
    with pytest.raises(TraceError, match=r"step-00000.safetensors: cannot be read: No such file"):
        read_all(folder)


def test_a_line_without_end_is_bounded(folder, monkeypatch):
    monkeypatch.setattr("diptych.lab.traces.reader.LONGEST_LINE", 50)
    with pytest.raises(TraceError, match=r"meta.json: is no JSON"):
        Trace.open(folder)
    (folder / "rank0/steps.jsonl").write_bytes(b" " * 51)
    monkeypatch.setattr("diptych.lab.traces.reader.META", "short")
    (folder / "short").write_text("{}")
    with pytest.raises(TraceError, match=r"short: lacks"):
        Trace.open(folder)


def test_changed_bytes_raise_nothing_else(folder):
    gen, paths = rng("damage"), [folder / "meta.json", *sorted((folder / "rank0").iterdir())]
    whole = {p: p.read_bytes() for p in paths}
    refused = 0
    for _ in range(300):
        path = paths[gen.integers(len(paths))]
        damaged = bytearray(whole[path])
        for at in gen.integers(0, len(damaged), gen.integers(1, 4)):
            damaged[at] = gen.integers(0, 256)
        path.write_bytes(damaged[: gen.integers(len(damaged))] if gen.random() < 0.2 else damaged)
        try:
            read_all(folder)
        except TraceError as e:
            refused += 1
            assert str(folder) in str(e)
        path.write_bytes(whole[path])
    assert refused > 100
    read_all(folder)


def test_samples_are_read(tmp_path):
    x = np.arange(5000, dtype=np.float32)
    trace = Trace.open(
        write(tmp_path / "t", [[entry("x", x.view(np.uint32), "float32")]], options=Options(values="sample"))
    )
    (observation,) = trace.ranks[0].step(0)
    assert observation.values is not None and not observation.values.whole
    assert len(set(observation.values.tensor.bits.tolist())) == observation.record.count == 1024
