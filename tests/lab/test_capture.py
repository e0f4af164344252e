"""The rules of captures that both frameworks share."""

from diptych.lab.capture import Calls


def test_names_that_print_alike_are_calls_of_one_site():
    calls = Calls()
    keys = [calls.site("activation", name, (2,), "float32").key for name in ("a\n", "a\t", "b")]
    assert keys == ["activation:a?", "activation:a?#1", "activation:b"]
