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
