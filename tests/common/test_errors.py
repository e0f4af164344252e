"""Errors and warnings name the command that explains them, and keep their messages."""

import copy
import pickle
import traceback
import warnings

import pytest

from diptych.common import errors
from diptych.common.files import FileError
from diptych.lab.explain import classes


class Own(errors.ShapeError):
    """A user's class."""


@pytest.mark.parametrize("held", [*classes().values()], ids=lambda c: c.__name__)
def test_a_message_is_kept_and_the_command_named(held):
    said = held("op: bad") if held is not FileError else held(2, "op: bad")
    if issubclass(held, errors.ExplainedWarning):
        assert str(said) == f"op: bad (diptych explain {held.__name__})" and said.args == ("op: bad",)
    else:
        lines = traceback.format_exception_only(said)
        assert str(said) == "op: bad" and lines[-1] == f"Cause and remedy: diptych explain {held.__name__}\n"


def test_notes_of_others_are_added_to_one_error_alone():
    first, second = errors.DTypeError("a"), errors.DTypeError("b")
    first.add_note("where it happened")
    assert first.__notes__ == ["Cause and remedy: diptych explain DTypeError", "where it happened"]
    assert second.__notes__ == first.__notes__[:1]
    for copied in (copy.copy(first), pickle.loads(pickle.dumps(first))):
        assert copied.__notes__ == first.__notes__ and str(copied) == "a"


def test_a_class_of_the_users_names_the_one_that_it_derives_from():
    assert Own("x").__notes__ == ["Cause and remedy: diptych explain ShapeError"]


def test_a_filter_by_the_message_finds_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="gemm: x")
        warnings.warn("gemm: x", errors.EmulationWarning, stacklevel=1)
