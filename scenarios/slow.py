"""Kernels and ranks that are slow, stopped or never return: told apart from ranks that diverged."""

from tpbed.harness.faults import Delay, Kill, Spin, Stall, Stop
from tpbed.harness.scenario import Expected, Scenario

SCENARIOS = (
    Scenario(
        name="slow/late-rank",
        claim="A rank that comes 0.3 s late is slow, not dead: no finding.",
        kind=0,
        source="vllm-project/vllm-ascend#14106",
        faults=(Delay(rank=1, seq=3, seconds=0.3),),
    ),
    Scenario(
        name="slow/every-rank-late-in-turn",
        claim="Delays that wander from rank to rank are no finding either.",
        kind=0,
        source="traceopt-ai/traceml#252",
        faults=tuple(Delay(rank=rank, seq=rank + 1, seconds=0.05) for rank in range(4)),
    ),
    Scenario(
        name="slow/topk-never-returns",
        claim="A top-k kernel that never returns on one rank: it is found inside it, and has skipped nothing.",
        kind=8,
        source="flashinfer-ai/flashinfer#3610, flashinfer-ai/flashinfer#3615",
        faults=(Spin(rank=0, step=1),),
        expect=(Expected(kind="stall", ranks=(0,), op="all_gather", seq=3, says="topk"),),
    ),
    Scenario(
        name="slow/topk-never-returns-anywhere",
        claim="The same on every rank: no collective is entered, no rank differs, and all are named.",
        kind=8,
        source="vllm-project/vllm#51593",
        world_size=2,
        org_vocab_size=1024,
        faults=(Spin(rank=0, step=1), Spin(rank=1, step=1)),
        expect=(Expected(kind="stall", ranks=(0, 1), says="topk"),),
    ),
    Scenario(
        name="slow/stalls-between-gathers",
        claim="A rank that computes for ever between two gathers is named at the second.",
        kind=8,
        source="lightseekorg/tokenspeed#297",
        faults=(Stall(rank=3, seq=4),),
        expect=(Expected(kind="stall", ranks=(3,), seq=4),),
    ),
    Scenario(
        name="slow/one-stalls-one-dies",
        claim="One rank allocates for ever and one is dead: the collective waits for both, and each is told apart.",
        kind=8,
        source="lightseekorg/tokenspeed#297",
        faults=(Stall(rank=3, seq=1), Kill(rank=1, seq=1)),
        expect=(Expected(kind="hang", ranks=(1, 3), seq=1, says="rank 3 is busy outside any collective"),),
    ),
    Scenario(
        name="slow/stopped-rank",
        claim="A stopped process is told from a dead and from a busy one.",
        kind=8,
        source="pytorch/pytorch#53773",
        faults=(Stop(rank=2, seq=3),),
        expect=(Expected(kind="stall", ranks=(2,), seq=3, says="is stopped"),),
    ),
)
