"""The checker itself: what passes in silence elsewhere must not pass here."""

from tpbed.harness.faults import Leave, Raise
from tpbed.harness.scenario import Expected, Scenario

SCENARIOS = (
    Scenario(
        name="checker/only-the-last-rank-is-wrong",
        claim="A wrong answer on rank 3 alone is found: no verdict comes from rank 0.",
        kind=10,
        source="sgl-project/sglang#40246",
        selector="last-rank-swaps-two",
        expect=(Expected(kind="diverge", ranks=(3,)),),
    ),
    Scenario(
        name="checker/all-ranks-leave-a-step-early",
        claim="Ranks that all return a step early agree with each other and hang nowhere: it is no pass.",
        kind=10,
        source="vllm-project/vllm#43547",
        faults=tuple(Leave(rank=rank, step=2) for rank in range(4)),
        expect=(Expected(kind="crash_all", ranks=(0, 1, 2, 3), says="answered 2 of 3 steps"),),
    ),
    Scenario(
        name="checker/error-after-the-last-collective",
        claim="A rank that raises when nobody waits any more is a crash all the same.",
        kind=10,
        source="vllm-project/vllm#23985",
        selector="last-rank-raises-afterwards",
        steps=1,
        expect=(Expected(kind="crash_one", ranks=(3,), error="ValueError"),),
    ),
    Scenario(
        name="checker/two-of-two-raise",
        claim="Every rank raising alike is a clean stop, and not a hang.",
        kind=10,
        source="NVIDIA/TensorRT-LLM#7507",
        world_size=2,
        org_vocab_size=1024,
        faults=(Raise(rank=0, seq=3), Raise(rank=1, seq=3)),
        expect=(Expected(kind="crash_all", ranks=(0, 1), error="InjectedError"),),
    ),
)
