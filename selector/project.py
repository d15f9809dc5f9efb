"""project_candidate_logits: hidden states to one shard's logits, on one path for every head."""

from __future__ import annotations

from math import inf
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tpbed.selector.admission import Path, admit
from tpbed.selector.head import LmHead, QuantMethod


@torch.no_grad()
def project_candidate_logits(hidden: Tensor, head: LmHead, *, path: Path | None = None, mask: bool = True) -> Tensor:
    """Project the whole padded shard, then overwrite every column that is no org token with -inf.

    path: as the ranks have agreed on it; None for what `admit` says of this rank's head.
    mask: False leaves the other columns as they come, for a top-k that never reads them.
    hidden: (rows, hidden units); a dense head reads it in its weight's dtype, a quant method as it comes.
    Returns (rows, width) in head.logits_dtype, contiguous, also for one row, no row, and a shard without a real token.
    Masked and never cropped: a cropped view is strided, top-k kernels refuse that, and then only the rank that holds
    the padding raises while its peers wait.
    Raises AdmissionError without a path, if `admit` does.
    Source: SGLang pull request 35496; 35462 cropped.
    """
    logits = _project(hidden, head, path or admit(head)[0]).to(head.logits_dtype).contiguous()
    if mask:
        logits[:, head.shard.num_org :].fill_(-inf)
    return logits


def _project(hidden: Tensor, head: LmHead, path: Path) -> Tensor:
    if path == "quantized":
        return cast(QuantMethod, head.quant_method).apply(head, hidden)
    return F.linear(hidden.to(head.weight.dtype), head.weight)
