"""Where Triton's kernels run in tests: on a CUDA device, or, slowly, in Triton's interpreter on the CPU."""

import os
from typing import Any

import numpy as np
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
    if not COMPILED:
        _reduce_xor_at_once()


def _reduce_xor_at_once() -> None:
    """Triton's interpreter takes the xor in a sort element by element, minutes for these tests: give it NumPy's."""
    from triton.runtime.interpreter import ReduceOps

    plain = ReduceOps.generic_reduce

    def generic_reduce(self: Any, given: Any) -> Any:
        if self.combine_fn.fn.__name__ != "_xor_combine" or self.axis is None:
            return plain(self, given)
        found = (np.bitwise_xor.reduce(one.handle.data, axis=self.axis, keepdims=self.keep_dims) for one in given)
        return [self.to_tensor(data, one.dtype) for data, one in zip(found, given, strict=True)]

    ReduceOps.generic_reduce = generic_reduce
