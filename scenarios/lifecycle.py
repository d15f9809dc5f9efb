"""Processes that die in the middle of a run."""

from tpbed.harness.faults import Exit, Kill, Raise
from tpbed.harness.scenario import Expected, Scenario

SCENARIOS = (
    Scenario(
        name="lifecycle/killed-rank",
        claim="A rank killed by SIGKILL is named with the signal, whatever its peers' transport reports.",
        kind=9,
        source="sgl-project/sglang#20287",
        faults=(Kill(rank=2, seq=3),),
        expect=(Expected(kind="hang", ranks=(2,), op="all_gather", seq=3, says="SIGKILL"),),
    ),
    Scenario(
        name="lifecycle/first-rank-killed",
        claim="Rank 0 is a rank like any other: its death is seen although it leads the group.",
        kind=9,
        source="ray-project/ray#26772",
        faults=(Kill(rank=0, seq=2),),
        expect=(Expected(kind="hang", ranks=(0,), seq=2, says="SIGKILL"),),
    ),
    Scenario(
        name="lifecycle/exits",
        claim="A rank that leaves through os._exit is named with its exit status.",
        kind=9,
        source="vllm-project/vllm#20860",
        faults=(Exit(rank=1, seq=4),),
        expect=(Expected(kind="hang", ranks=(1,), seq=4, says="exit status 1"),),
    ),
    Scenario(
        name="lifecycle/one-raises-one-dies",
        claim="A rank that raises and a rank that dies at the same collective are both named, each with its own end.",
        kind=9,
        source="pytorch/pytorch#55010",
        faults=(Raise(rank=1, seq=3), Kill(rank=3, seq=3)),
        expect=(Expected(kind="hang", ranks=(1, 3), seq=3, error="InjectedError", says="SIGKILL"),),
    ),
)
