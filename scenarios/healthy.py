"""Nothing goes wrong: the selector is right on every geometry, and no finding is invented."""

from tpbed.harness.scenario import Scenario

SCENARIOS = (
    Scenario(name="healthy/tp1", claim="One rank answers without a collective.", kind=0, world_size=1),
    Scenario(name="healthy/tp2-odd-vocabulary", claim="TP=2, 1,001 tokens.", kind=0, world_size=2, org_vocab_size=1001),
    Scenario(name="healthy/tp4-padded-tail", claim="TP=4, 1,000 tokens: 24 columns of padding on rank 3.", kind=0),
    Scenario(
        name="healthy/tp3-padded-to-192",
        claim="TP=3 shares 1,000 tokens once they are padded to a multiple of 3.",
        kind=0,
        source="sgl-project/sglang#31799",
        world_size=3,
        pad_to=192,
    ),
    Scenario(
        name="healthy/tp8-mostly-padding",
        claim="TP=8, 65 tokens: three ranks hold padding only and one a single token, with k=16.",
        kind=0,
        source="vllm-project/vllm-ascend#16628",
        world_size=8,
        org_vocab_size=65,
    ),
    Scenario(
        name="healthy/fp32-gaussian",
        claim="fp32 weights and random states: every value is within its error bound of the float64 reference.",
        kind=0,
        head="fp32",
        logits="gaussian",
    ),
    Scenario(name="healthy/fp16", claim="A float16 head.", kind=0, head="fp16", logits="gaussian"),
    Scenario(
        name="healthy/no-rows",
        claim="A step without a row is a step: all ranks join its collectives.",
        kind=0,
        source="vllm-project/vllm#43547",
        rows=0,
    ),
    Scenario(
        name="healthy/k-is-1",
        claim="k=1 is the argmax.",
        kind=0,
        k=1,
    ),
    Scenario(
        name="healthy/k-is-the-vocabulary",
        claim="k equal to the vocabulary orders all of it.",
        kind=0,
        org_vocab_size=130,
        k=130,
    ),
)
