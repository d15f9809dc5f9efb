"""tpbed.selector: the k best tokens of a vocabulary that is sharded over tensor-parallel ranks.

`compute_candidates` is the selector; `tpbed.selector.reference` holds the unsharded answer that it is judged by.
"""

from tpbed.selector.admission import AdmissionError, Ruling, admit, admits_quant_method, is_dense_head
from tpbed.selector.candidates import Candidates, Merge
from tpbed.selector.checkpoint import read_packed, write_packed
from tpbed.selector.errors import SelectionError
from tpbed.selector.folder import CheckpointError
from tpbed.selector.fp8 import (
    Fp8Head,
    Fp8Method,
    dequantise_fp8,
    pack_fp8_per_block,
    pack_fp8_per_channel,
    pack_fp8_per_tensor,
)
from tpbed.selector.head import DenseHead, HeadError, LmHead, QuantMethod
from tpbed.selector.int8 import Int8Head, dequantise_int8, pack_int8
from tpbed.selector.lattice import TransitionTables, lattice_scores
from tpbed.selector.merge import merge_gathered, two_gather_merge
from tpbed.selector.noise import keyed_gumbels, keyed_uniforms
from tpbed.selector.nvfp4 import Nvfp4Head, Nvfp4Method, dequantise_nvfp4, pack_nvfp4
from tpbed.selector.packed import MAX_ID, keyed_topk, pack_keys, packed_merge, unpack_keys
from tpbed.selector.packet import agree_on_draft
from tpbed.selector.project import project_candidate_logits
from tpbed.selector.quantized import FORMATS, Format, QuantizedHead, load_head
from tpbed.selector.reference import Discrepancy, error_bound, explain_candidates, reference_logits, reference_topk
from tpbed.selector.scheme import QuantFormat
from tpbed.selector.select import Note, Policy, compute_candidates
from tpbed.selector.shard import NO_TOKEN, ShardError, VocabShard
from tpbed.selector.tiles import TiledMethod
from tpbed.selector.topk import (
    KeyedTopK,
    TopK,
    canonical_topk,
    check_topk_contract,
    contract_topk,
    default_topk,
    flashinfer_topk,
    torch_topk,
)
from tpbed.selector.triton_topk import TritonTopK, triton_topk
from tpbed.selector.unary import unary_transform
from tpbed.selector.verify import verify
from tpbed.selector.vote import agree_admission
from tpbed.selector.walk import Draft, DraftParams, Noise, draft_distribution, walk

__all__ = [
    "FORMATS",
    "MAX_ID",
    "NO_TOKEN",
    "AdmissionError",
    "Candidates",
    "CheckpointError",
    "DenseHead",
    "Discrepancy",
    "Draft",
    "DraftParams",
    "Format",
    "Fp8Head",
    "Fp8Method",
    "HeadError",
    "Int8Head",
    "KeyedTopK",
    "LmHead",
    "Merge",
    "Noise",
    "Note",
    "Nvfp4Head",
    "Nvfp4Method",
    "Policy",
    "QuantFormat",
    "QuantMethod",
    "QuantizedHead",
    "Ruling",
    "SelectionError",
    "ShardError",
    "TiledMethod",
    "TopK",
    "TransitionTables",
    "TritonTopK",
    "VocabShard",
    "admit",
    "admits_quant_method",
    "agree_admission",
    "agree_on_draft",
    "canonical_topk",
    "check_topk_contract",
    "compute_candidates",
    "contract_topk",
    "default_topk",
    "dequantise_fp8",
    "dequantise_int8",
    "dequantise_nvfp4",
    "draft_distribution",
    "error_bound",
    "explain_candidates",
    "flashinfer_topk",
    "is_dense_head",
    "keyed_gumbels",
    "keyed_topk",
    "keyed_uniforms",
    "lattice_scores",
    "load_head",
    "merge_gathered",
    "pack_fp8_per_block",
    "pack_fp8_per_channel",
    "pack_fp8_per_tensor",
    "pack_int8",
    "pack_keys",
    "pack_nvfp4",
    "packed_merge",
    "project_candidate_logits",
    "read_packed",
    "reference_logits",
    "reference_topk",
    "torch_topk",
    "triton_topk",
    "two_gather_merge",
    "unary_transform",
    "unpack_keys",
    "verify",
    "walk",
    "write_packed",
]
