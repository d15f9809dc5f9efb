"""Ranks that do not come to the rendezvous of the group, and ranks that do not get out at the end."""

from tpbed.harness.faults import Absent, Late, Linger
from tpbed.harness.scenario import PROCESSES, Expected, Scenario

SCENARIOS = (
    Scenario(
        name="lifecycle/never-comes",
        claim="A rank that is alive and never comes to the rendezvous is named at the deadline; its peers wait there.",
        kind=9,
        source="vllm-project/vllm#39015, verl-project/verl#6967",
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
        name="lifecycle/port-taken",
        claim="A rank 0 whose port another group has taken meanwhile is named at once; its peers wait for no time-out.",
        kind=9,
        source=("vllm-project/vllm#39015, vllm-project/vllm#43206, verl-project/verl#6677, sgl-project/sglang#37215"),
        worlds=PROCESSES,
        world_size=2,
        org_vocab_size=1024,
        faults=(Absent(rank=0, how="port"),),
        expect=(Expected(kind="init_fail", ranks=(0,), error="OSError", says="Address already in use"),),
    ),
    Scenario(
        name="lifecycle/out-of-memory-before-it-comes",
        claim="A rank that runs out of memory on its way into the group is named, though its process is alive.",
        kind=9,
        source="NVIDIA/nccl#582",
        worlds=PROCESSES,
        faults=(Absent(rank=2, how="exhaust"),),
        expect=(Expected(kind="init_fail", ranks=(2,), error="RuntimeError", says="can't allocate memory"),),
    ),
    Scenario(
        name="lifecycle/comes-late",
        claim="A rank that comes to the rendezvous 0.3 s after its peers is waited for: no finding.",
        kind=0,
        source="vllm-project/vllm#39015, verl-project/verl#6967, verl-project/verl#7045",
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
