"""Pickling: what rank programs and results keep on the way, and what is refused."""

import functools
import subprocess
import sys
import threading

import cloudpickle
import pytest
import torch

from tpbed.tp.pickling import ProgramError, ResultError, pickle_program, pickle_result


def program(rank):
    return helper(rank)


def helper(rank):
    return rank + 1


def raising(rank):
    raise ValueError(rank)


def elsewhere(pickled: bytes, expression: str) -> str:
    """What the expression gives in a Python that cannot import this test."""
    code = f"import sys, pickle; program = pickle.load(sys.stdin.buffer); print({expression})"
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, input=pickled, capture_output=True, check=True).stdout.decode().strip()


@pytest.mark.parametrize("given", [program, functools.partial(helper), lambda rank: helper(rank)])
def test_a_program_of_a_test_runs_where_the_test_cannot_be_imported(given):
    assert elsewhere(pickle_program(given), "program(1)") == "2"


def test_code_keeps_its_file():
    assert elsewhere(pickle_program(raising), "program.__code__.co_filename") == __file__


def test_a_program_of_a_package_goes_by_name():
    assert b"torch.functional" in pickle_program(torch.functional.norm)


def test_what_cannot_be_pickled_is_refused_by_name():
    lock = threading.Lock()
    with pytest.raises(ProgramError, match="lock"):
        pickle_program(lambda rank: lock)
    with pytest.raises(ResultError, match="dict that cannot be pickled.*lock"):
        pickle_result({"lock": lock})


def test_tensors_come_back_equal():
    back = cloudpickle.loads(pickle_result({"t": torch.arange(3), "l": [torch.ones(2, dtype=torch.bfloat16)]}))
    assert back["t"].tolist() == [0, 1, 2] and back["l"][0].dtype == torch.bfloat16


def test_threads_that_pickle_at_once_do_not_undo_each_others_register():
    """Each holds the register while it pickles: the second can only come when the first has left."""
    inside, entered = threading.Event(), []

    class Slow:
        def __reduce__(self):
            inside.set()
            other.join(0.2)  # it cannot end before this has
            entered.append("first")
            return int, ()

    def second():
        inside.wait(30)
        pickle_program(functools.partial(program, 1))
        entered.append("second")

    other = threading.Thread(target=second)
    other.start()
    pickle_program(functools.partial(program, Slow()))
    other.join()
    assert entered == ["first", "second"]


def test_a_module_that_somebody_registered_stays_registered():
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        pickle_program(program)
        assert module.__name__ in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(module)
