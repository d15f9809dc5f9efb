"""What `make test-gpu` lacks on this machine, a line each; fails if there is any: skipped tests would prove nothing."""

import sys

import torch

from tpbed.selector.topk import has_flashinfer
from tpbed.selector.triton_topk import has_triton

NEEDED = {
    "a CUDA device, its driver, and a torch that is built for CUDA": torch.cuda.is_available(),
    "triton: a torch that is built for CUDA brings it": has_triton(),
    "flashinfer: pip install 'tpbed[gpu]'": has_flashinfer(),
}

lacking = [name for name, there in NEEDED.items() if not there]
if lacking:
    told = "".join(f"\n  {name}" for name in lacking)
    sys.exit(f"The tests of kernels need what is not here; `tpbed doctor` says more:{told}")
