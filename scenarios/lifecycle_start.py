"""Ranks that do not come to the rendezvous of the group, and ranks that do not get out at the end."""

from tpbed.harness.faults import Absent, Late, Linger
from tpbed.harness.scenario import PROCESSES, Expected, Scenario

SCENARIOS = (
    Scenario(
        name="lifecycle/never-comes",
        claim="A rank that is alive and never comes to the rendezvous is named at the deadline; its peers wait there.",
        kind=9,
        source="vllm-project/vllm#39015",
        worlds=PROCESSES,
        faults=(Absent(rank=1),),
        expect=(Expected(kind="init_fail", ranks=(1,), says="does not come to the rendezvous"),),
    ),
    Scenario(
        name="lifecycle/killed-before-it-comes",
        claim="A rank that is killed while the group is formed is named at once, and not those that wait for it.",
        kind=9,
        source="sgl-project/sglang#20287",
        worlds=PROCESSES,
        faults=(Absent(rank=3, how="kill"),),
        expect=(Expected(kind="init_fail", ranks=(3,), says="SIGKILL before the group was formed"),),
    ),
    Scenario(
        name="lifecycle/stopped-before-it-comes",
        claim="A rank that is stopped on its way to the rendezvous is told from one that is busy.",
        kind=9,
        source="pytorch/pytorch#53773",
        worlds=PROCESSES,
        faults=(Absent(rank=2, how="stop"),),
        expect=(Expected(kind="init_fail", ranks=(2,), says="is stopped"),),
    ),
    Scenario(
        name="lifecycle/comes-late",
        claim="A rank that comes to the rendezvous 0.3 s after its peers is waited for: no finding.",
        kind=0,
        source="vllm-project/vllm#39015",
        worlds=PROCESSES,
        faults=(Late(rank=1, seconds=0.3),),
    ),
    Scenario(
        name="lifecycle/teardown-blocks",
        claim="A rank that has answered everything and never gets out of its teardown is named, with where it hangs.",
        kind=9,
        source="sgl-project/SpecForge#781",
        faults=(Linger(rank=1),),
        expect=(Expected(kind="stall", ranks=(1,), says="teardown"),),
    ),
    Scenario(
        name="lifecycle/slow-teardown",
        claim="A teardown that takes 0.3 s longer than that of the others is no finding.",
        kind=0,
        source="sgl-project/SpecForge#781",
        faults=(Linger(rank=1, seconds=0.3),),
    ),
)
