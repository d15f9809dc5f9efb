"""Quantized heads: packed weights, scales, admission."""

from tpbed.harness.faults import PackedOnly, StaleMethod, WrongScale
from tpbed.harness.scenario import Expected, Scenario

SCENARIOS = (
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
        source="jundot/omlx#2844",
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
