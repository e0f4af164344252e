"""Writing traces: what is written is read, values within the budget, and a process killed at any moment."""

import dataclasses
import errno
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from trace_tools import STORED, entry, few, meta, random_bits, rng, write

from diptych.common.files import FileError
from diptych.lab.traces import (
    SAMPLES,
    Entry,
    Options,
    Site,
    Trace,
    TraceError,
    Writer,
    places,
)  # fmt: skip


def same(trace: Trace, steps: list[list[Entry]], rank: int = 0) -> None:
    """A trace has these steps, with whole values."""
    assert trace.ranks[rank].steps == list(range(len(steps)))
    for number, entries in enumerate(steps):
        observations = trace.ranks[rank].step(number)
        assert [(r.site, r.record.statistics, r.record.hash) for r in observations] == [e[:3] for e in entries]
        for observation, e in zip(observations, entries, strict=True):
            assert observation.values is not None and observation.values.whole
            dtype, bits = observation.values.tensor
            assert (dtype.name, observation.record.count) == (e.site.dtype, e.site.size)
            np.testing.assert_array_equal(bits, e.values)


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_written_is_read(tmp_path, ranks):
    each = [few(rng("written", rank), 3) for rank in range(ranks)]
    for rank in reversed(range(ranks)):  # in any order
        with Writer(tmp_path / "t", meta(ranks=ranks), rank) as writer:
            for number, entries in enumerate(each[rank]):
                writer.step(number, entries)
    trace = Trace.open(tmp_path / "t")
    assert trace.meta == meta(ranks=ranks) and list(trace.ranks) == list(range(ranks)) and trace.steps == [0, 1, 2]
    for rank, steps in enumerate(each):
        same(trace, steps, rank)
    names = ["meta.json", *(f"rank{r}/{n}" for r in range(ranks) for n in RANK_FILES)]
    assert sorted(str(p.relative_to(tmp_path / "t")) for p in (tmp_path / "t").rglob("*") if p.is_file()) == names


RANK_FILES = ["step-00000.safetensors", "step-00001.safetensors", "step-00002.safetensors", "steps.jsonl"]


@pytest.mark.parametrize("seed", range(8))
def test_random_sites_and_budgets(tmp_path, seed):
    gen = rng("budgets", seed)
    options = Options(values=str(gen.choice(["hash", "sample", "full"])), budget=int(10 ** gen.integers(0, 7)))
    steps = []
    for _ in range(3):
        made = []
        for i in range(gen.integers(0, 9)):
            shape = tuple(int(n) for n in gen.integers(0, 90, gen.integers(0, 3)))
            dtype = str(gen.choice(STORED))
            made.append(entry(f"s{i}", random_bits(gen, dtype, shape), dtype))
        steps.append(made)
    trace = Trace.open(write(tmp_path / "t", steps, options=options))
    kept = 0
    for number, entries in enumerate(steps):
        for observation, e in zip(trace.ranks[0].step(number), entries, strict=True):
            record, values = observation.record, observation.values
            assert (observation.site, record.statistics, record.hash) == e[:3]
            wanted = {"hash": 0, "sample": min(SAMPLES, e.site.size), "full": e.site.size}[options.values]
            assert record.cut == (record.count < wanted)
            if values is None:
                assert record.count == 0
                continue
            kept += values.tensor.bits.nbytes
            assert values.whole == (record.values == "whole") and values.tensor.bits.size == record.count
            flat = e.values.reshape(-1)
            np.testing.assert_array_equal(
                values.tensor.bits, e.values if values.whole else flat[places(flat.size, record.count)]
            )
    assert kept <= options.budget


def test_a_frontend_may_take_the_samples_itself(tmp_path):
    x = rng("sample").standard_normal((50, 60)).astype(np.float32)
    for name, take in (("whole", lambda p: x), ("flat", lambda p: x.reshape(-1)[places(x.size, p.count)])):
        with Writer(tmp_path / name, meta(options=Options(values="sample"))) as writer:
            site = Site("x", "result", 0, x.shape, "float32")
            (plan,) = writer.plan([site])
            assert (plan.values, plan.count) == ("sampled", SAMPLES)
            writer.step(0, [Entry(site, values=take(plan))])
    files = [(tmp_path / n / "rank0/step-00000.safetensors").read_bytes() for n in ("whole", "flat")]
    assert files[0] == files[1]


def test_values_are_not_needed_where_none_are_kept(tmp_path):
    trace = Trace.open(write(tmp_path / "t", [[e._replace(values=None) for e in few(rng())[0]]], options=Options()))
    assert all(r.values is None and not r.record.cut for r in trace.ranks[0].step(0))
    assert not (tmp_path / "t/rank0/step-00000.safetensors").exists()


def test_a_site_is_written_once_and_may_change(tmp_path):
    a, b = (entry("x", np.zeros(n, np.float32).view(np.uint32), "float32") for n in (3, 4))
    path = write(tmp_path / "t", [[a], [a], [b], [a]])
    lines = (path / "rank0/steps.jsonl").read_text().splitlines()
    assert ['"name":"x"' in line for line in lines] == [True, False, True, False]
    assert [Trace.open(path).ranks[0].step(s)[0].site.shape for s in range(4)] == [(3,), (3,), (4,), (3,)]


def test_what_becomes_known_is_noted_later(tmp_path):
    with Writer(tmp_path / "t", meta()) as writer:
        assert Trace.open(tmp_path / "t").meta.plain_bits is None
        writer.note(plain_bits=True)
        assert Trace.open(tmp_path / "t").meta == meta(plain_bits=True)
        writer.note(device="cuda", recipe="MXFP8BlockScaling()")
        assert Trace.open(tmp_path / "t").meta == meta(plain_bits=True, device="cuda", recipe="MXFP8BlockScaling()")


def test_steps_may_be_left_out_and_not_repeated(tmp_path):
    with Writer(tmp_path / "t", meta()) as writer:
        for step in (3, 100000):
            writer.step(step, few(rng())[0])
        for step in (100000, 4, -1):
            with pytest.raises(TraceError, match=rf"steps.jsonl: step {step} does not follow step 100000"):
                writer.step(step, [])
    assert Trace.open(tmp_path / "t").steps == [3, 100000]
    assert (tmp_path / "t/rank0/step-100000.safetensors").exists()


def test_a_folder_holds_one_trace(tmp_path):
    write(tmp_path / "t", few(rng()))
    before = sorted((p, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file())
    with pytest.raises(TraceError, match="t/rank0: is there; a trace needs a new folder"):
        Writer(tmp_path / "t", meta())
    assert before == sorted((p, p.read_bytes()) for p in tmp_path.rglob("*") if p.is_file())
    with pytest.raises(TraceError, match="rank 1 is not one of 1"):
        Writer(tmp_path / "t", meta(), 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="file/rank0: cannot be written: Not a directory"):
        Writer(tmp_path / "file", meta())


def test_wrong_entries_leave_no_step(tmp_path):
    good = entry("x", np.zeros((2, 3), np.uint32), "float32")
    other = dataclasses.replace(good.site, shape=(6,))
    with Writer(tmp_path / "t", meta()) as writer:
        for entries, error, why in (
            ([good, good], TraceError, "activation:x has two records in a step"),
            ([good, good._replace(site=other)], TraceError, "activation:x has two records in a step"),
            ([good._replace(values=None)], ValueError, "activation:x: its values are missing, the plan keeps 6"),
            ([good._replace(values=np.zeros(6, np.float32))], ValueError, r"have shape \[6\], the site has \[2, 3\]"),
            ([good._replace(values=np.zeros((2, 3)))], TypeError, "float64 does not have float32's bits"),
            ([good._replace(hash="x")], ValueError, "hash"),
            (
                [entry("y", good.values, "float32", inputs=("activation:x",)), good],
                TraceError,
                "an input 'activation:x'",
            ),
        ):
            with pytest.raises(error, match=why):
                writer.step(0, entries)
            assert Trace.open(tmp_path / "t").steps == []
        writer.step(0, [good, entry("y", good.values, "float32", inputs=("activation:x",))])
    assert Trace.open(tmp_path / "t").steps == [0]


@pytest.mark.parametrize("e", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_failed_write_leaves_the_steps_before(tmp_path, monkeypatch, call, e):
    """`write` appends a line, here the first half of it; `fsync` ends the file with the values."""
    steps, real, calls = few(rng("disk"), 2), getattr(os, call), []

    def fail(fd, *data):
        calls.append(fd)
        if call == "write" and len(calls) == 1:
            return real(fd, data[0][: len(data[0]) // 2])
        raise e

    with Writer(tmp_path / "t", meta()) as writer:
        writer.step(0, steps[0])
        with monkeypatch.context() as patched:
            patched.setattr(os, call, fail)
            file = "steps.jsonl" if call == "write" else "step-00001.safetensors"
            why = f"{file}: cannot be written: No space" if isinstance(e, OSError) else None
            with pytest.raises(FileError if isinstance(e, OSError) else KeyboardInterrupt, match=why):
                writer.step(1, steps[1])
        assert calls and Trace.open(tmp_path / "t").steps == [0] and not Trace.open(tmp_path / "t").ranks[0].torn
        writer.step(1, steps[1])
    same(Trace.open(tmp_path / "t"), steps)


KILLED = """
import os, signal, sys
from trace_tools import Writer, few, meta, rng
folder, first, every, most = sys.argv[1], *map(int, sys.argv[2:])
steps = few(rng("killed"), 3)
files = ("traces/writer.py", "traces/tensor_file.py", "common/files.py")
for at in range(first, most, every):
    done, reports = os.pipe()
    if (pid := os.fork()) == 0:
        count = 0
        def trace(frame, event, arg):
            global count
            if not frame.f_code.co_filename.endswith(files):
                return None
            count += event == "line"
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace
        sys.settrace(trace)
        with Writer(f"{folder}/{at}", meta()) as writer:
            for number, entries in enumerate(steps):
                writer.step(number, entries)
                os.write(reports, b".")
        os._exit(0)
    os.close(reports)
    killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    print(at, len(os.read(done, 9)), flush=True)
    os.close(done)
    if not killed:
        break
"""


@pytest.mark.parametrize(
    ("first", "every"), [(1, 7), *(pytest.param(n, 7, marks=pytest.mark.slow) for n in range(2, 8))]
)
def test_a_process_killed_at_any_line_leaves_its_complete_steps(tmp_path, first, every):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [sys.executable, "-c", KILLED, str(tmp_path), str(first), str(every), "9999"]
    out = subprocess.run(arguments, capture_output=True, text=True, env=env)
    assert out.stderr == "" and out.returncode == 0, out.stderr
    moments = [tuple(map(int, line.split())) for line in out.stdout.splitlines()]
    steps = few(rng("killed"), 3)
    assert {done for _, done in moments} == {0, 1, 2, 3}
    for at, done in moments:
        folder = tmp_path / str(at)
        if not (folder / "meta.json").exists():
            assert done == 0
            with pytest.raises(TraceError, match=r"meta.json: cannot be read"):
                Trace.open(folder)
            continue
        trace = Trace.open(folder)
        written = len(trace.ranks[0].steps) if trace.ranks else 0
        assert done <= written <= done + 1
        if written:
            same(trace, steps[:written])


FOREVER = """
import sys, numpy as np
from trace_tools import *
with Writer(sys.argv[1], meta(options=Options(values="full", budget=10**12))) as writer:
    print("begun", flush=True)
    for number in range(10**9):
        bits = np.full((300, 300), number, np.uint32)
        writer.step(number, [entry(f"a{i}", bits + np.uint32(i), "float32") for i in range(20)])
"""


def test_a_process_killed_at_some_time_leaves_its_complete_steps(tmp_path):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = 0
    for i in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", FOREVER, str(tmp_path / f"{i}")], stdout=subprocess.PIPE, env=env
        ) as p:
            assert p.stdout is not None and p.stdout.readline() == b"begun\n"
            lines = tmp_path / f"{i}/rank0/steps.jsonl"
            until = time.monotonic() + 60
            while i == 0 and not (lines.exists() and lines.read_bytes()) and time.monotonic() < until:
                time.sleep(0.01)  # one of the three has a step, also where the machine is slow
            time.sleep(float(rng("time", i).uniform(0, 0.7)))
            p.kill()
        rank = Trace.open(tmp_path / f"{i}").ranks[0]
        assert rank.steps == list(range(len(rank.steps)))
        for step in rank.steps:
            for k, observation in enumerate(rank.step(step)):
                assert observation.values is not None and (observation.values.tensor.bits == step + k).all()
                found += 1
    assert found


def test_incomplete_lines_are_left_out(tmp_path):
    steps = few(rng("torn"), 2)
    path = write(tmp_path / "t", steps) / "rank0/steps.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in [*range(0, first + 3), *range(first + 3, len(whole), 97), len(whole) - 1, len(whole)]:
        path.write_bytes(whole[:end])
        trace = Trace.open(tmp_path / "t")
        complete = whole[:end].count(b"\n")
        assert trace.ranks[0].torn == (end not in (0, first, len(whole)))
        same(trace, steps[:complete])
