"""Ranks that end with different results, or agree on a wrong one."""

from tpbed.harness.faults import Corrupt, Nudge
from tpbed.harness.scenario import Expected, Scenario

SCENARIOS = (
    Scenario(
        name="diverge/rescored-on-one-rank",
        claim="A rank that rounds the merged values its own way holds other candidates than its peers, and is named.",
        kind=4,
        source="sgl-project/sglang#31071",
        head="fp32",
        logits="gaussian",
        selector="rescore-locally",
        expect=(Expected(kind="diverge", ranks=(1,)),),
    ),
    Scenario(
        name="diverge/never-gathers",
        claim="Ranks that answer from their own shards all differ, and no majority is made up.",
        kind=4,
        source="ggml-org/llama.cpp#27858",
        selector="shard-only",
        expect=(Expected(kind="diverge", ranks=(0, 1, 2, 3)), Expected(kind="wrong_ids")),
    ),
    Scenario(
        name="diverge/one-logit-off",
        claim="A logit that one rank computes wrong reaches all ranks alike: they agree on a wrong id.",
        kind=4,
        source="sgl-project/sglang#31071",
        faults=(Nudge(rank=1, step=1, row=0, column=5, value=1e30),),
        expect=(Expected(kind="wrong_ids", says="step 1"),),
    ),
    Scenario(
        name="diverge/corrupted-on-the-wire",
        claim="A contribution that changes on its way, in the right shape, is found by the reference alone.",
        kind=8,
        source="ztxz16/fastllm#725",
        faults=(Corrupt(rank=2, seq=3),),
        expect=(Expected(kind="wrong_ids", says="step 1"),),
    ),
)
