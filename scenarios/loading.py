"""Heads that were loaded, sharded, cast or admitted in a wrong way, masks and adapters of another width."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import TypeVar

from tpbed.harness.faults import (
    BlocksFromOwnRow,
    Fact,
    Inflated,
    JunkScale,
    NoWeight,
    Replayed,
    ScaleDropped,
    StaleMethod,
    Unloaded,
    Unmasked,
    Unpadded,
)
from tpbed.harness.scenario import Expected, Overwrite, Scenario

WRONG = (Expected(kind="wrong_ids"),)
FP8 = Scenario(name="", claim="", kind=7, org_vocab_size=1024, head="fp8", logits="gaussian")
NVFP4 = replace(FP8, head="nvfp4-modelopt")


F = TypeVar("F")


def _everywhere(fault: Callable[..., F], **fields: object) -> tuple[F, ...]:
    return tuple(fault(rank=rank, **fields) for rank in range(4))


def _forbidden(tokens: range) -> tuple[Overwrite, ...]:
    return tuple(Overwrite(row=row, token_id=token, value=-inf) for row in range(4) for token in tokens)


NO_WEIGHT = replace(
    FP8,
    name="loading/head-without-weight",
    claim="A head that keeps its rows under another name is refused on every rank alike.",
    source="vllm-project/vllm#53104, vllm-project/vllm#52543",
    faults=_everywhere(NoWeight),
    expect=(Expected(kind="crash_all", error="AdmissionError", says="head has no weight"),),
)
UNPADDED = Scenario(
    name="loading/share-before-padding",
    claim="A weight that was allocated for 251 rows where the padded share has 256 is refused on every rank alike.",
    kind=5,
    source="vllm-project/vllm#12230",
    org_vocab_size=1002,
    faults=_everywhere(Unpadded),
    expect=(Expected(kind="crash_all", error="HeadError", says="holds 256 rows"),),
)
CLASS = Scenario(
    name="loading/guard-by-class",
    claim="A guard that knows one class of unquantized methods refuses a plain head that has another.",
    kind=7,
    source="vllm-project/vllm#52883, 1CatAI/1Cat-vLLM#451",
    faults=_everywhere(StaleMethod, method="UnquantizedLinearMethod"),
    selector="guard-by-class",
    expect=(Expected(kind="crash_all", error="AdmissionError", says="taken for quantized"),),
)
REPLAY = replace(
    FP8,
    name="loading/product-beside-the-graph",
    claim="A product that was launched beside the captured stream is not replayed: later steps answer the first one.",
    kind=7,
    source="vllm-project/vllm#2147, thu-ml/SageAttention#371",
    faults=_everywhere(Replayed),
    expect=(Expected(kind="wrong_ids", says="step 1"),),
)
ADAPTER = Scenario(
    name="loading/adapter-of-the-whole-vocabulary",
    claim="An adapter as wide as the vocabulary does not fit a shard: every rank raises alike.",
    kind=5,
    source="sgl-project/sglang#16215, sgl-project/sglang#18649",
    org_vocab_size=1024,
    selector="add-whole-adapter",
    expect=(Expected(kind="crash_all", error="RuntimeError", says="must match the size"),),
)
MASK = Scenario(
    name="loading/mask-on-the-entry-rank",
    claim="A constraint that only rank 0 masks lets forbidden tokens of the other shards win.",
    kind=5,
    source="sgl-project/sglang#13947, sgl-project/sglang#16845, sgl-project/sglang#38392",
    overwrites=_forbidden(range(100, 1000, 2)),
    faults=tuple(Unmasked(rank=rank) for rank in (1, 2, 3)),
    expect=(Expected(kind="wrong_ids", says="a token of -inf is no candidate"),),
)
TOKENIZER = Scenario(
    name="loading/rows-without-a-token",
    claim="24 trained rows beyond the tokenizer are no padding: only a bound of the tokenizer's own keeps them out.",
    kind=5,
    source="vllm-project/vllm#13175, verl-project/verl#1398, verl-project/verl#7882, NVIDIA-NeMo/RL#237",
    org_vocab_size=1024,
    k=64,
    overwrites=_forbidden(range(1000, 1024)),
    faults=_everywhere(Unmasked),
    expect=(Expected(kind="wrong_ids", says="a token of -inf is no candidate"),),
)
PADDED_SCORES = Scenario(
    name="loading/scores-over-padding",
    claim="A normaliser that counts padding moves all scores by an amount that depends on TP; the ids stay right.",
    kind=5,
    source="NVIDIA/Megatron-LM#2370",
    world_size=3,
    pad_to=192,
    logits="negative",
    selector="normalise-over-padding",
    expect=(Expected(kind="wrong_ids", says="the logit of this id is"),),
)
STRIDED = Scenario(
    name="loading/view-of-a-wide-buffer",
    claim="Logits that are a view of a wider buffer are refused by the kernel, on every rank alike.",
    kind=1,
    source="flashinfer-ai/flashinfer#1866, flashinfer-ai/flashinfer#1916",
    selector="wide-buffer",
    expect=(Expected(kind="crash_all", error="RuntimeError", says="input must be contiguous"),),
)

SCENARIOS = (
    replace(
        FP8,
        name="loading/packed-head-never-read",
        claim="A packed checkpoint that a plain weight ignores leaves what memory held: healthy to look at, and wrong.",
        source="sgl-project/sglang#35358, sgl-project/sglang#28130",
        faults=_everywhere(Unloaded),
        expect=WRONG,
    ),
    replace(
        NVFP4,
        name="loading/packed-weight-as-dense",
        claim="Two entries a byte multiplied as one: the product does not fit, on any rank.",
        source="sgl-project/sglang#34742, sgl-project/sglang#35354, sgl-project/sglang#35423",
        selector="multiply-as-dense",
        expect=(Expected(kind="crash_all", ranks=(0, 1, 2, 3), error="RuntimeError", says="cannot be multiplied"),),
    ),
    replace(
        NVFP4,
        name="loading/buffer-of-packed-dtype",
        claim="Logits written to a uint8 buffer are refused by a kernel with flashinfer's contract, on every rank.",
        source="sgl-project/sglang#34742",
        selector="buffer-of-weight-dtype",
        expect=(Expected(kind="crash_all", error="AssertionError", says="Unsupported dtype torch.uint8"),),
    ),
    replace(
        NVFP4,
        name="loading/buffer-of-packed-dtype-unchecked",
        claim="A kernel that takes any dtype answers from the same buffer, without a word.",
        source="sgl-project/sglang#34742",
        selector="buffer-of-weight-dtype",
        topk="canonical",
        expect=WRONG,
    ),
    CLASS,
    replace(
        CLASS,
        name="loading/plain-head-by-any-method",
        claim="The same head is admitted for what its weight is, with the answers of a dense one.",
        kind=0,
        selector="tpbed",
        expect=(),
    ),
    replace(
        NVFP4,
        name="loading/hidden-units-times-ranks",
        claim="A packed head allocated for world_size times the hidden units is refused on every rank alike.",
        source="NVIDIA/TensorRT-LLM#16352",
        faults=_everywhere(Inflated),
        expect=(Expected(kind="crash_all", error="SelectionError", says="but the head multiplies 256"),),
    ),
    replace(
        NVFP4,
        name="loading/hidden-units-times-one",
        claim="At TP=1 the same load is right: more than one rank is needed to show it.",
        kind=0,
        source="NVIDIA/TensorRT-LLM#16352",
        world_size=1,
        faults=(Inflated(rank=0),),
    ),
    replace(
        FP8,
        name="loading/scale-dropped",
        claim="An FP8 head that is cast to bfloat16 without its scales ranks every row by its own unit.",
        source="NVIDIA/TensorRT-LLM#17728, NVIDIA/TensorRT-LLM#17723",
        faults=_everywhere(ScaleDropped),
        expect=WRONG,
    ),
    replace(
        FP8,
        name="loading/one-scale-dropped",
        claim="With one scale for all the same ids win, and only their values tell that it is missing.",
        source="NVIDIA/TensorRT-LLM#17728",
        head="fp8-tensor",
        faults=_everywhere(ScaleDropped),
        expect=(Expected(kind="wrong_ids", says="the logit of this id is"),),
    ),
    replace(
        FP8,
        name="loading/scale-of-an-unwritten-slot",
        claim="The largest of two scales, one of which was never written, ranks a whole shard too high.",
        source="sgl-project/sglang#29151, sgl-project/sglang#14102",
        head="fp8-tensor",
        faults=(JunkScale(rank=1, junk=1.0),),
        expect=WRONG,
    ),
    replace(
        FP8,
        name="loading/blocks-from-own-row",
        claim="Shares of 160 rows with blocks counted from their own first row: rows have the scales of others.",
        source="vllm-project/vllm#40999, sgl-project/sglang#35228",
        org_vocab_size=600,
        head="fp8-block",
        faults=_everywhere(BlocksFromOwnRow),
        expect=WRONG,
    ),
    replace(
        FP8,
        name="loading/blocks-of-whole-shares",
        claim="Shares of 256 rows begin with a block, and counting from their own first row is right.",
        kind=0,
        source="vllm-project/vllm#40999",
        head="fp8-block",
        faults=_everywhere(BlocksFromOwnRow),
    ),
    NO_WEIGHT,
    replace(
        NO_WEIGHT,
        name="loading/head-without-weight-on-one-rank",
        claim="The same on one rank alone strands the others.",
        faults=(NoWeight(rank=2),),
        expect=(Expected(kind="hang", ranks=(2,), seq=1, error="AdmissionError", says="head has no weight"),),
    ),
    Scenario(
        name="loading/stale-method-refused",
        claim="A dense weight with a ModelOpt method left on it is served as dense: the layout counts, not the name.",
        kind=0,
        source="vllm-project/vllm#52147, vllm-project/vllm#45535",
        faults=_everywhere(StaleMethod, method="ModelOptFp8LinearMethod"),
    ),
    Scenario(
        name="loading/head-and-embedding-padded-apart",
        claim="Columns of a head padded to 256, numbered by the shares of an embedding padded to 64.",
        kind=5,
        source="vllm-project/vllm#20843",
        world_size=2,
        org_vocab_size=1100,
        pad_to=256,
        selector="offset-by-embedding",
        expect=WRONG,
    ),
    Scenario(
        name="loading/head-and-embedding-padded-alike",
        claim="Where both are padded to 64 the same numbers are right.",
        kind=0,
        source="vllm-project/vllm#20843",
        world_size=2,
        org_vocab_size=1100,
        selector="offset-by-embedding",
    ),
    Scenario(
        name="loading/mask-of-the-base-vocabulary",
        claim="An allow-mask of 1,024 tokens on 272 local columns raises on every rank alike.",
        kind=5,
        source="vllm-project/vllm#15978, tenstorrent/vllm#330, Blaizzy/mlx-vlm#1805, Blaizzy/mlx-vlm#1917",
        org_vocab_size=1024,
        added_vocab_size=16,
        selector="allow-by-base-vocabulary",
        expect=(Expected(kind="crash_all", error="RuntimeError", says="must match the size"),),
    ),
    ADAPTER,
    replace(
        ADAPTER,
        name="loading/adapter-of-the-first-shard",
        claim="An adapter of which every rank adds the first columns is right on rank 0 alone.",
        org_vocab_size=1020,
        pad_to=4,
        selector="add-first-adapter",
        expect=WRONG,
    ),
    replace(
        ADAPTER,
        name="loading/adapter-of-own-shard",
        claim="An adapter of which every rank adds its own columns is right.",
        kind=0,
        org_vocab_size=1020,
        pad_to=4,
        selector="add-own-adapter",
        expect=(),
    ),
    Scenario(
        name="loading/ids-beyond-the-table",
        claim="A table of 800 tokens looked up by ids of 1,024: all ranks hold the same ids, and raise alike.",
        kind=5,
        source="local-inference-lab/vllm#547, vllm-project/vllm#52816",
        worlds=("sim", "gloo"),
        org_vocab_size=1024,
        selector="map-ids",
        expect=(Expected(kind="crash_all", ranks=(0, 1, 2, 3), error="IndexError"),),
    ),
    Scenario(
        name="loading/ids-clamped-to-the-table",
        claim="The same look-up, clamped, says nothing and answers with the last token of the table.",
        kind=5,
        source="local-inference-lab/vllm#547",
        org_vocab_size=1024,
        selector="map-ids-clamped",
        expect=WRONG,
    ),
    UNPADDED,
    replace(
        UNPADDED,
        name="loading/share-before-padding-on-one-rank",
        claim="The same on one rank alone: it raises while it loads, and its peers wait in their first gather.",
        faults=(Unpadded(rank=1),),
        expect=(Expected(kind="hang", ranks=(1,), seq=1, error="HeadError", says="before any collective"),),
    ),
    PADDED_SCORES,
    replace(
        PADDED_SCORES,
        name="loading/scores-over-tokens",
        claim="A normaliser over tokens alone gives the same scores at every TP.",
        kind=0,
        selector="normalise-over-tokens",
        expect=(),
    ),
    REPLAY,
    replace(
        REPLAY,
        name="loading/product-of-the-first-step",
        claim="A single step does not show it.",
        kind=0,
        steps=1,
        expect=(),
    ),
    replace(
        NVFP4,
        name="loading/groups-that-do-not-divide",
        claim="29 half groups of hidden units do not divide into groups of 16: refused on every rank alike.",
        source="jundot/omlx#2844, huggingface/transformers#37543",
        hidden_size=232,
        expect=(Expected(kind="crash_all", error="HeadError", says="does not divide into groups of 16"),),
    ),
    MASK,
    replace(
        MASK,
        name="loading/mask-on-every-rank",
        claim="The same constraint, masked on every rank, holds.",
        kind=0,
        faults=(),
        expect=(),
    ),
    TOKENIZER,
    replace(
        TOKENIZER,
        name="loading/rows-without-a-token-masked",
        claim="Bounded by the tokenizer, the same head is right.",
        kind=0,
        faults=(),
        expect=(),
    ),
    STRIDED,
    replace(
        STRIDED,
        name="loading/view-of-a-wide-buffer-on-one-rank",
        claim="Where one rank alone has the wide buffer, it raises and its peers wait.",
        faults=tuple(Fact(rank=rank, name="buffer_is_wide", value=False) for rank in (0, 2, 3)),
        expect=(Expected(kind="hang", ranks=(1,), seq=1, error="RuntimeError", says="input must be contiguous"),),
    ),
    replace(
        STRIDED,
        name="loading/view-of-one-row",
        claim="A view of a single row is contiguous, and passes.",
        kind=0,
        rows=1,
        expect=(),
    ),
)
