"""`diptych explain`."""

import json

from diptych.lab import cli
from diptych.lab.explain import classes, parts


def test_each_class_says_what_it_is_its_cause_and_its_remedy():
    for name, held in classes().items():
        what, cause, remedy = parts(held)
        assert min(map(len, (what, cause, remedy))) > 20, name
        assert what.endswith(".") and cause.endswith(".") and remedy.endswith("."), name


def test_one_class(capsys):
    assert cli.main(["explain", "EmulationWarning"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("EmulationWarning (a UserWarning): A quantized product") and "Remedy: Take" in said


def test_without_a_name_all_are_listed(capsys):
    assert cli.main(["explain"]) == 0
    said = capsys.readouterr().out
    assert all(f"{name}: " in said for name in classes())


def test_as_json(capsys):
    assert cli.main(["explain", "--json", "-", "ShapeError"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["name"] == "ShapeError" and found["catch"] == "ValueError"


def test_a_name_that_does_not_exist_gets_the_nearest(capsys):
    assert cli.main(["explain", "emulationwarnin"]) == 2
    assert "there are EmulationWarning" in capsys.readouterr().err
