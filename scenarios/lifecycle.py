"""Processes that die, run out of memory or are stopped in the middle of a run."""

from tpbed.harness.faults import Crash, Exhaust, Exit, Kill, Pause, Quit, Raise
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
        source="ray-project/ray#26772, ray-project/ray#59339",
        faults=(Kill(rank=0, seq=2),),
        expect=(Expected(kind="hang", ranks=(0,), seq=2, says="SIGKILL"),),
    ),
    Scenario(
        name="lifecycle/exits",
        claim="A rank that leaves through os._exit is named with its exit status.",
        kind=9,
        source="vllm-project/vllm#20860, redai-studio/Relax#265",
        faults=(Exit(rank=1, seq=4),),
        expect=(Expected(kind="hang", ranks=(1,), seq=4, says="exit status 1"),),
    ),
    Scenario(
        name="lifecycle/sys-exit",
        claim="A rank that calls sys.exit leaves its program and not its process: SystemExit is its error.",
        kind=9,
        source="pytorch/pytorch#55010, sgl-project/sglang#27221",
        faults=(Quit(rank=2, seq=3, status=0),),
        expect=(Expected(kind="hang", ranks=(2,), op="all_gather", seq=3, error="SystemExit"),),
    ),
    Scenario(
        name="lifecycle/every-rank-calls-sys-exit",
        claim="Where all ranks call sys.exit at the same place nobody waits: a clean stop.",
        kind=9,
        source="pytorch/pytorch#55010",
        faults=tuple(Quit(rank=rank, seq=3) for rank in range(4)),
        expect=(Expected(kind="crash_all", ranks=(0, 1, 2, 3), error="SystemExit"),),
    ),
    Scenario(
        name="lifecycle/segfault",
        claim="A rank that crashes in C is named with the signal.",
        kind=9,
        source="vllm-project/vllm#20860",
        faults=(Crash(rank=1, seq=3),),
        expect=(Expected(kind="hang", ranks=(1,), op="all_gather", seq=3, says="SIGSEGV"),),
    ),
    Scenario(
        name="lifecycle/out-of-memory",
        claim="A rank that gets no more memory raises alone, and is named with what its allocator said.",
        kind=9,
        source="GeeeekExplorer/nano-vllm#275",
        faults=(Exhaust(rank=3, seq=4),),
        expect=(
            Expected(
                kind="hang", ranks=(3,), op="all_gather", seq=4, error="RuntimeError", says="can't allocate memory"
            ),
        ),
    ),
    Scenario(
        name="lifecycle/every-rank-out-of-memory",
        claim="Where all ranks run out of memory at the same place nobody waits: a clean stop.",
        kind=9,
        source="GeeeekExplorer/nano-vllm#275",
        faults=tuple(Exhaust(rank=rank, seq=3) for rank in range(4)),
        expect=(Expected(kind="crash_all", ranks=(0, 1, 2, 3), says="can't allocate memory"),),
    ),
    Scenario(
        name="lifecycle/paused-rank",
        claim="A rank that is stopped for 0.3 s and continued, both from outside, is slow, not dead: no finding.",
        kind=0,
        source="pytorch/pytorch#53773",
        faults=(Pause(rank=2, seq=3, seconds=0.3),),
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
