"""What all tests share: hypothesis without deadlines, with the same examples every time in CI; one thread of torch."""

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
pytest_plugins = ["pytester"]


@pytest.fixture(scope="module")
def one_thread():
    """For modules in which what is computed is too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
