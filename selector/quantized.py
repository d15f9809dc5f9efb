"""FORMATS: the packed formats by name, each with its packer, head and meaning; load_head, what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from tpbed.selector.checkpoint import EMBEDDING, LM_HEAD, Packed, read_packed
from tpbed.selector.folder import CheckpointPath
from tpbed.selector.fp8 import Fp8Head, dequantise_fp8, pack_fp8
from tpbed.selector.head import DenseHead
from tpbed.selector.int8 import Int8Head, dequantise_int8, pack_int8
from tpbed.selector.nvfp4 import Nvfp4Head, dequantise_nvfp4, pack_nvfp4
from tpbed.selector.shard import ShardError, VocabShard

QuantizedHead = Fp8Head | Int8Head | Nvfp4Head


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A packed format. pack: a whole weight to its tensors. head: a shard of these. dequantise: back, in float64."""

    pack: Callable[[Tensor], dict[str, Tensor]]
    head: Callable[[Packed, VocabShard], QuantizedHead]
    dequantise: Callable[[Packed], Tensor]


def _dequantise_fp8(packed: Packed) -> Tensor:
    return dequantise_fp8(packed["weight"], packed["weight_scale"])


FORMATS: Mapping[str, Format] = {  # by QuantFormat
    "fp8": Format(pack=partial(pack_fp8, granularity="channel"), head=Fp8Head.from_packed, dequantise=_dequantise_fp8),
    "fp8-tensor": Format(
        pack=partial(pack_fp8, granularity="tensor"), head=Fp8Head.from_packed, dequantise=_dequantise_fp8
    ),
    "fp8-block": Format(
        pack=partial(pack_fp8, granularity="block"), head=Fp8Head.from_packed, dequantise=_dequantise_fp8
    ),
    "int8": Format(pack=pack_int8, head=Int8Head.from_packed, dequantise=dequantise_int8),
    "nvfp4-ct": Format(pack=pack_nvfp4, head=Nvfp4Head.from_packed, dequantise=dequantise_nvfp4),
    "nvfp4-modelopt": Format(
        pack=partial(pack_nvfp4, layout="modelopt"),
        head=partial(Nvfp4Head.from_packed, layout="modelopt"),
        dequantise=partial(dequantise_nvfp4, layout="modelopt"),
    ),
}


def load_head(
    path: CheckpointPath, shard: VocabShard, *, name: str = LM_HEAD, tied_to: str = EMBEDDING
) -> DenseHead | QuantizedHead:
    """The shard's part of the head in the checkpoint in folder `path`, in the format that its config gives.

    path may be a str. Raises CheckpointError as read_packed does, HeadError or ShardError where the head does not fit
    the shard.
    """
    if not isinstance(shard, VocabShard):
        raise ShardError(f"shard={shard!r} is {type(shard).__name__}: give VocabShard.even(rank, world_size, tokens).")
    found, packed = read_packed(path, name, tied_to=tied_to)
    if found is None:
        return DenseHead.from_full(packed["weight"], shard)
    return FORMATS[found].head(packed, shard)
