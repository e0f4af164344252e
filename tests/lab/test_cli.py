import importlib.metadata
import json
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from diptych.common import RECIPES, format_by_name, linear_plan
from diptych.lab import checkpoint, cli, frontend
from diptych.lab.arguments import SHELLS

MODEL = ["--width", "32", "--layers", "1", "--heads", "2", "--seq", "16"]
TINY = [*MODEL, "--batch", "2", "--eval-batches", "1", "--no-compile", "--threads", "1", "--quiet"]


def refused(argv, capsys) -> str:
    """The message of a command that must refuse its arguments."""
    try:
        status = cli.main(argv)
    except SystemExit as e:
        status = e.code
    assert status == 2
    message = capsys.readouterr().err
    assert "error: " in message and message.endswith("\n") and message.count("\n") == 1
    return message


def test_version(capsys):
    with pytest.raises(SystemExit) as e:
        cli.main(["--version"])
    assert e.value.code == 0
    assert capsys.readouterr().out == f"diptych {importlib.metadata.version('diptych')}\n"


@pytest.mark.parametrize("command", [[], *map(list, zip(cli.COMMANDS))])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main([*command, "--help"])
    assert e.value.code == 0
    assert "usage: diptych" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["doctor", "--loud"], "--loud"),
        (["doctor", "--json", "/dev/full/x"], "--json /dev/full/x"),
        (["completion"], "shell"),
        (["completion", "fish"], "fish"),
        (["train"], "--framework"),
        (["train", "--framework", "numpy"], "numpy"),
        (["train", "--framework", "torch", "--recipe", "fp4"], "fp4"),
        (["train", "--framework", "torch", "--steps", "0"], "must be at least 1, got 0"),
        (["train", "--framework", "torch", "--steps", "many"], "'many' is not a whole number"),
        (["train", "--framework", "torch", "--lr", "nan"], "must be positive and finite"),
        (["train", "--framework", "torch", "--warmup", "-1"], "argument --warmup: must be at least 0, got -1"),
        (["train", "--framework", "jax", "--clip", "0"], "argument --clip: must be positive and finite, got 0"),
        (["compare", "--seeds", "0"], "argument --seeds: must be at least 1, got 0"),
        (["train", "--framework", "torch", "--seeds", "2"], "--seeds"),
        (["compare", "--clip", "inf"], "argument --clip: must be positive and finite, got inf"),
        (["train", "--framework", "torch", "--width", "30"], "width 30 is not a multiple of heads 4"),
        (["train", "--framework", "torch", "--data", "/no/such/place"], "/no/such/place: no such file"),
        (["train", "--framework", "jax", "--resume", "/no/such/run"], "/no/such/run: no such checkpoint"),
        (["train", "--framework", "torch", "--high-blocks", "5"], "high_blocks must be less than layers, 5, got 5"),
        (["train", "--framework", "jax", "--recipe", "none", "--high-blocks", "1"], "--high-blocks: without a recipe"),
        (["compare", "--recipe", "none"], "none"),
        (["compare", "--data", "/no/such/place"], "/no/such/place: no such file"),
        (["compare", "--corrupt-scale", "numpy"], "numpy"),
        (["compare", "--seed", "-1"], "must be at least 0, got -1"),
        (["train", "--framework", "torch", "--data", ""], "argument --data: '' is not a path"),
        (["train", "--framework", "torch", "--out", "a\0b"], "is not a path"),
        (["train", "--framework", "torch", "--data", "/dev/zero"], "/dev/zero: is a character device; give a file"),
        (["train", "--framework", "torch", "--resume", "/dev/zero"], "/dev/zero: is a character device, not a file"),
        (["train", "--framework", "torch", "--out", "/dev/null"], "/dev/null: is not a folder but a character device"),
        (["train", "--framework", "torch", "--threads", "100000"], "must be at most 1024, got 100000"),
        (["train", "--framework", "torch", "--steps", "1" + "0" * 15], "too large for this machine's memory"),
        (["train", "--framework", "torch", "--batch", "1" + "0" * 13], "too large for this machine's memory"),
    ],
)
def test_bad_arguments_are_named(argv, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert named in refused(argv, capsys)


def test_cuda_without_a_cuda_build_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diptych.core.build_info", lambda: {"cuda": False})
    assert "no CUDA backend" in refused(["train", "--framework", "torch", "--device", "cuda"], capsys)


def test_out_that_is_a_file(capsys, tmp_path, text):
    taken = tmp_path / "taken"
    taken.write_text("")
    argv = ["train", "--framework", "torch", "--data", str(text), "--out", str(taken), *TINY]
    assert "is not a folder" in refused(argv, capsys)


def test_a_frontend_that_does_not_load_is_named(capsys, monkeypatch, tmp_path):
    class Broken:
        name = "jax"

        def load(self):
            raise ImportError("no module named jax")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(frontend.importlib.metadata, "entry_points", lambda group: [Broken()])
    message = refused(["train", "--framework", "jax"], capsys)
    assert "no module named jax" in message and "pip install 'diptych[jax]'" in message
    assert cli.main(["doctor"]) == 0
    assert "not usable: ImportError: no module named jax" in capsys.readouterr().out


def test_doctor_without_any_frontend(capsys, monkeypatch):
    monkeypatch.setattr(frontend.importlib.metadata, "entry_points", lambda group: [])
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["frontends"] == {}
    assert {r["recipe"] for r in found["recipes"]} == set(RECIPES)


def test_doctor(capsys, tmp_path):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["frontends"]) == {"torch", "jax"}
    assert all(f["usable"] for f in found["frontends"].values())
    assert "jaxlib headers" in found["frontends"]["jax"]["versions"]
    on_cpu = [r for r in found["recipes"] if r["device"] == "CPU"]
    assert len(on_cpu) == len(RECIPES)
    aligned = {p["aligned"]["level"] for r in on_cpu for p in r["products"].values()}
    assert aligned | {o["level"] for r in on_cpu for o in r["ops"]} == {"native"}
    for r in on_cpu:
        packed = any(format_by_name(f).pack > 1 for f in r["formats"])
        levels = {p["unaligned"]["level"] for p in r["products"].values()}
        assert levels == ({"refused"} if packed else {"native"}), r["recipe"]
        states = linear_plan(RECIPES[r["recipe"]]).states
        assert {o["op"] for o in r["ops"]} == {"quantize", *["scale_update"] * bool(states)}
    assert {f for r in on_cpu for f in r["formats"]} <= set(found["formats"])
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "cpu.gemm" in text and "mxfp8 on CPU" in text
    assert cli.main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    assert capsys.readouterr().out == text
    assert set(json.loads((tmp_path / "doctor.json").read_text())) == set(found)


def test_train_writes_resumes_and_protects_its_checkpoint(capsys, tmp_path, text):
    base = ["train", "--framework", "torch", "--steps", "4", "--data", str(text), *TINY]
    out = ["--out", str(tmp_path / "a")]
    assert cli.main([*base, *out, "--stop-after", "2"]) == 0
    assert "exists: --resume" in refused([*base, *out], capsys)
    assert cli.main([*base, "--resume", str(tmp_path / "a")]) == 0
    assert cli.main([*base, "--out", str(tmp_path / "b")]) == 0
    resumed, whole = (json.loads((tmp_path / d / "results.json").read_text()) for d in "ab")
    assert resumed["losses"] == whole["losses"] and len(whole["losses"]) == 4
    assert resumed["validation"] == whole["validation"]
    capsys.readouterr()
    assert cli.main([*base, *out, "--overwrite", "--json"]) == 0
    printed, err = capsys.readouterr()
    assert json.loads(printed)["losses"] == whole["losses"] and "4 of 4 steps" in err


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_knows_all_commands(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in cli.COMMANDS) and "--keep-traces" in script


@pytest.mark.parametrize(
    ("words", "found"),
    [(["di"], "diff"), (["replay", "--de"], "--device"), (["train", "--recipe", "mxfp8-"], "mxfp8-2d"),
     (["diff", "--json", "pypro"], "pyproject.toml"), (["compl"], "completion")],
)  # fmt: skip
def test_bash_completes(words, found, capsys):
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    cli.main(["completion", "bash"])
    script = capsys.readouterr().out + (
        f"\nCOMP_WORDS=({shlex.join(['diptych', *words])}) COMP_CWORD={len(words)}; _shtab_diptych\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.split() == [found], done.stderr


def test_completion_without_shtab(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install 'diptych[lab]'" in refused(["completion", "zsh"], capsys)


def test_the_lab_knows_no_framework():
    code = "import sys, diptych.lab.cli, diptych.lab.compare, diptych.lab.report, diptych.lab.doctor\n"
    code += "print('torch' in sys.modules, 'jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_the_installed_command_exits_non_zero_on_bad_input():
    code = "import sys; from diptych.lab.cli import main; sys.exit(main())"
    out = subprocess.run([sys.executable, "-c", code, "train", "--framework", "torch", "--data", "/no/such/place"],
                         capture_output=True, text=True)  # fmt: skip
    assert out.returncode == 2
    assert "diptych train: error: /no/such/place" in out.stderr


FAKE = """
import sys, time
import numpy as np
from diptych.lab import cli, frontend
from diptych.lab.frontend import State

class Trainer:
    def __init__(self, weights):
        self.steps, self.weights = 0, weights
    def step(self, batch):
        self.steps += 1
        if self.steps == 3:
            print("three", flush=True)
        time.sleep({pause})
        return 1.0
    def evaluate(self, batch): return 1.0
    def scales(self): return {{}}
    def state(self): return State(self.steps, self.weights, self.weights, self.weights, {{}})
    def restore(self, state): self.steps = state.step

class Fake:
    name = "torch"
    def versions(self): return {{}}
    def device_problem(self, device): return None
    def trainer(self, job, weights): return Trainer(weights)

frontend.require = lambda name, device: Fake()
sys.exit(cli.main())
"""


def fake(pause: float, *argv: str) -> subprocess.Popen[str]:
    """`diptych train` with a framework that does nothing, `pause` seconds a step."""
    command = [sys.executable, "-c", FAKE.format(pause=pause), "train", "--framework", "torch", *TINY, *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_an_interrupted_run_keeps_its_checkpoint_and_a_second_one_is_refused_meanwhile(tmp_path, text, capsys):
    out = tmp_path / "run"
    argv = ["--data", str(text), "--out", str(out), "--checkpoint-every", "1"]
    first = fake(0.05, *argv)
    assert first.stdout is not None
    while first.stdout.readline() != "three\n":
        assert first.poll() is None
    second = refused(["train", "--framework", "torch", *TINY, *argv, "--overwrite"], capsys)
    assert second == (
        f"diptych train: error: {out}: another run (process {first.pid}) writes there; "
        "wait for it or choose another --out\n"
    )
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=20)
    assert first.returncode == 130
    step = checkpoint.load(out).state.step
    assert step >= 2
    kept = out / checkpoint.FILE_NAME
    assert err == f"diptych train: error: interrupted; {kept} holds {step} steps, and --resume {out} goes on\n"
    assert [p.name for p in out.iterdir()] == [checkpoint.FILE_NAME]
    rest = fake(0, "--data", str(text), "--resume", str(out), "--stop-after", str(step + 2))
    assert rest.wait(timeout=20) == 0
    assert checkpoint.load(out).state.step == step + 2
    assert sorted(p.name for p in out.iterdir()) == [checkpoint.FILE_NAME, "results.json"]


def test_an_interrupt_between_two_checkpoints_writes_one(tmp_path, text):
    out = tmp_path / "run"
    run = fake(0.05, "--data", str(text), "--out", str(out), "--checkpoint-every", "0")
    assert run.stdout is not None
    while run.stdout.readline() != "three\n":
        assert run.poll() is None
    run.send_signal(signal.SIGINT)
    err = run.communicate(timeout=20)[1]
    assert run.returncode == 130
    step = checkpoint.load(out).state.step
    assert step >= 3 and f"interrupted; {out / checkpoint.FILE_NAME} holds {step} steps" in err


@pytest.mark.parametrize("lost", [False, True])
def test_an_interrupt_before_the_first_step_ends_the_run_at_once(tmp_path, text, lost):
    """Even where a framework loses the exception."""
    code = FAKE.format(pause=30)
    code = code.replace("self.steps += 1", "print('three', flush=True)")
    if lost:
        code = code.replace("time.sleep(30)", "[self.sleep() for _ in range(30)]").replace(
            "    def scales", "    def sleep(self):\n        try: time.sleep(1)\n"
            "        except KeyboardInterrupt: pass\n    def scales")  # fmt: skip
        code = code.replace(
            "frontend.require =", "from diptych.lab import interrupt\ninterrupt.GRACE = 0.5\nfrontend.require ="
        )
    out = tmp_path / "run"
    command = [
        sys.executable,
        "-c",
        code,
        "train",
        "--framework",
        "torch",
        *TINY,
        "--data",
        str(text),
        "--out",
        str(out),
    ]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    while run.stdout.readline() != "three\n":
        assert run.poll() is None
    run.send_signal(signal.SIGINT)
    assert run.communicate(timeout=10)[1] == "diptych train: error: interrupted; no checkpoint was written yet\n"
    assert run.returncode == 130


def test_a_folder_where_a_result_belongs_is_refused_before_the_run(tmp_path, text, capsys):
    for name in (checkpoint.FILE_NAME, "results.json"):
        (tmp_path / name / name).mkdir(parents=True)
        argv = ["train", "--framework", "torch", "--data", str(text), "--out", str(tmp_path / name), *TINY]
        assert f"{name}: is a folder, where a file is to be written" in refused(argv, capsys)


def test_a_disk_that_is_full_at_the_end(tmp_path, text):
    """The results do not fit: the error names them, the checkpoint stays."""
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, -1))\n" + FAKE.format(pause=0)
    command = [sys.executable, "-c", code, "train", "--framework", "torch", *MODEL, "--data", str(text), "--out"]
    run = [*command, str(tmp_path), "--quiet", "--steps", "2", "--checkpoint-every", "1"]
    out = subprocess.run(run, capture_output=True, text=True)
    assert out.returncode == 2
    path = tmp_path / checkpoint.FILE_NAME
    assert out.stderr == f"diptych train: error: {path}: cannot be written: File too large; nothing is there\n"
    assert not list(tmp_path.iterdir())


def test_whoever_reads_the_output_may_stop():
    command = "cli.COMMANDS['doctor'] = lambda *_: print('said')"  # which imports no framework
    code = f"import sys; from diptych.lab import cli; {command}; sys.exit(cli.main(['doctor']))"
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()
    assert run.wait(timeout=60) == 1
    assert run.stderr.read() == ""
