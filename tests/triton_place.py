"""Where Triton's kernels run in tests: on a CUDA device, or, slowly, in Triton's interpreter on the CPU."""

import os

import pytest
import torch

from tpbed.selector.triton_topk import has_triton

COMPILED = torch.cuda.is_available()
PLACE = torch.device("cuda" if COMPILED else "cpu")
if not COMPILED:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are loaded

quiet_interpreter = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's


def require_triton() -> None:
    """Skip the whole module that calls this, with one line that says why and what to do."""
    if not has_triton():
        pytest.skip("triton is not installed: pip install triton, for its interpreter", allow_module_level=True)
