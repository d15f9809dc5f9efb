"""Quantized heads: packed weights, scales, admission."""

from dataclasses import replace

from tpbed.harness.faults import PackedOnly, StaleMethod, WrongScale
from tpbed.harness.scenario import Expected, Scenario

PACKED = Scenario(
    name="",
    claim="",
    kind=0,
    org_vocab_size=1000,  # pads to 1,024: shares of 256 rows at TP=4, in which no block of 128 is cut
    hidden_size=144,  # nine groups of 16, and a block of 128 with a partial one
    head="nvfp4-ct",
    logits="gaussian",
)

SCENARIOS = (
    *(
        replace(
            PACKED,
            name=f"quantized/{head}-tp{tp}",
            claim=f"A head packed as {head} at TP={tp}: candidates equal the dequantized reference.",
            world_size=tp,
            head=head,
        )
        for tp in (1, 2, 4)
        for head in ("fp8", "fp8-tensor", "fp8-block", "int8", "nvfp4-ct", "nvfp4-modelopt")
    ),
    replace(
        PACKED,
        name="quantized/nvfp4-cropped",
        claim="An NVFP4 head whose padding is cropped, not masked: only the tail rank's view is strided; it raises.",
        kind=7,
        source="sgl-project/sglang#35496",
        selector="crop",
        expect=(
            Expected(
                kind="hang", ranks=(3,), op="all_gather", seq=1, error="RuntimeError", says="input must be contiguous"
            ),
        ),
    ),
    replace(
        PACKED,
        name="quantized/block-cut-by-a-rank",
        claim="Shares of 160 rows cut the blocks of 128 that have one scale: every rank refuses alike, nobody waits.",
        kind=7,
        source="vllm-project/vllm#52147, vllm-project/vllm#40999, sgl-project/sglang#35228",
        org_vocab_size=600,
        head="fp8-block",
        expect=(Expected(kind="crash_all", error="ShardError", says="cuts a block of 128 rows"),),
    ),
    replace(
        PACKED,
        name="quantized/nvfp4-scale-of-another-shard",
        claim="Group scales that do not follow the vocabulary rows give logits that no right head can.",
        kind=7,
        source="jundot/omlx#2844",
        world_size=2,
        org_vocab_size=1024,
        faults=(WrongScale(rank=1, scale_of=0),),
        expect=(Expected(kind="wrong_ids"),),
    ),
    Scenario(
        name="quantized/fp8",
        claim="A head of packed float8_e4m3fn rows with a scale each: candidates equal the dequantized reference.",
        kind=0,
        head="fp8",
        logits="gaussian",
    ),
    Scenario(
        name="quantized/scale-of-another-shard",
        claim="Scales that do not follow the vocabulary rows rank a whole shard too high or too low.",
        kind=7,
        source="jundot/omlx#2844, huggingface/transformers#37543",
        world_size=2,
        org_vocab_size=1024,
        head="fp8",
        logits="gaussian",
        faults=(WrongScale(rank=1, scale_of=0),),
        expect=(Expected(kind="wrong_ids"),),
    ),
    Scenario(
        name="quantized/one-rank-without-method",
        claim="A packed head that lost its quant method on one rank: that rank refuses, and its peers wait for it.",
        kind=7,
        source="sgl-project/sglang#35534",
        head="fp8",
        logits="gaussian",
        faults=(PackedOnly(rank=2),),
        expect=(Expected(kind="hang", ranks=(2,), seq=1, error="AdmissionError"),),
    ),
    Scenario(
        name="quantized/all-ranks-without-method",
        claim="The same on every rank is a uniform refusal: nobody waits.",
        kind=7,
        source="sgl-project/sglang#35534",
        head="fp8",
        logits="gaussian",
        faults=tuple(PackedOnly(rank=rank) for rank in range(4)),
        expect=(Expected(kind="crash_all", error="AdmissionError"),),
    ),
    Scenario(
        name="quantized/stale-method-on-one-rank",
        claim="A dense head that still carries a packed head's method fails on the rank that has it.",
        kind=7,
        source="vllm-project/vllm#52147",
        faults=(StaleMethod(rank=1),),
        expect=(Expected(kind="hang", ranks=(1,), seq=1, error="AttributeError", says="weight_scale"),),
    ),
    Scenario(
        name="quantized/stale-method-agreed",
        claim="The same head under a vote: every rank raises before any projection, with every rank's reason.",
        kind=7,
        source="vllm-project/vllm#52147",
        faults=(StaleMethod(rank=1),),
        selector="agreed",
        expect=(Expected(kind="crash_all", error="AdmissionError", says="rank 1 goes quantized"),),
    ),
    Scenario(
        name="quantized/agreed",
        claim="Heads that are alike pass the vote.",
        kind=0,
        source="vllm-project/vllm#52147",
        head="fp8",
        logits="gaussian",
        selector="agreed",
    ),
)
