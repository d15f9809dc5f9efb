"""Decisions that a rank takes from facts of its own - a clock, its memory, its tuning -, alone and with its peers."""

from dataclasses import replace

from tpbed.harness.faults import Fact
from tpbed.harness.scenario import Expected, Scenario


def _odd(ranks: tuple[int, ...], seq: int, says: str) -> tuple[Expected, ...]:
    return (Expected(kind="mismatch", ranks=ranks, seq=seq, says=says),)


PAIR = Scenario(name="", claim="", kind=3, world_size=2, org_vocab_size=1024)

CLOCK = Scenario(
    name="decision/expired-by-own-clock",
    claim="A clock that is 1 ms behind keeps a request for one step longer: rank 3 brings a row more than its peers.",
    kind=3,
    source="sgl-project/sglang#27221, sgl-project/sglang#27164, sgl-project/sglang#37143",
    selector="drop-by-own-clock",
    faults=(Fact(rank=3, name="clock_ms", value=9, step=1),),
    expect=_odd((3,), 3, "decided live=4 because its clock shows 9 ms"),
)
MEMORY = replace(
    PAIR,
    name="decision/capacity-of-own-memory",
    claim="A rank with less free memory refuses a step that its peer can take, and is named with its capacity.",
    source="GeeeekExplorer/nano-vllm#275, GeeeekExplorer/nano-vllm#259, NVIDIA/TensorRT-LLM#17380",
    selector="fit-own-memory",
    faults=(Fact(rank=1, name="capacity", value=3),),
    expect=(Expected(kind="hang", ranks=(1,), seq=1, says="4 rows exceed a capacity of 3"),),
)
GRAPH = replace(
    PAIR,
    name="decision/graph-for-own-batch",
    claim="A rank that may not replay its graph brings 4 rows where its peer brings the 8 of the graph.",
    source="sgl-project/sglang#32196, sgl-project/sglang#32182",
    selector="pad-for-own-graph",
    faults=(Fact(rank=1, name="graph", value=False, step=1),),
    expect=_odd((1,), 3, "decided graph=False"),
)
CAPTURE = replace(
    PAIR,
    name="decision/capture-entered-alone",
    claim="A rank that captures runs none of the gathers that it records: it is a step ahead of its peer.",
    source="pegainfer-project/pegainfer#498, pegainfer-project/pegainfer#496, vllm-project/vllm#56869",
    selector="capture-alone",
    faults=(Fact(rank=0, name="captures", value=True, step=1),),
    expect=_odd((0,), 3, "decided captures=True"),
)
TACTICS = Scenario(
    name="decision/tactics-of-own-device",
    claim="A rank that tunes 13 tactics, with a barrier for each, is in the barrier where its peers gather.",
    kind=3,
    source="flashinfer-ai/flashinfer#3186, sgl-project/sglang#23317, sgl-project/sglang#35343",
    selector="tune-alone",
    faults=(Fact(rank=0, name="tactics", value=13),),
    expect=_odd((0,), 2, "decided tactics=13"),
)
SCRATCH = Scenario(
    name="decision/caught-and-skipped",
    claim="A rank that catches its error and goes on skips the barrier of its peers; what it caught is told.",
    kind=3,
    source="local-inference-lab/vllm#618",
    selector="scratch-alone",
    faults=(Fact(rank=0, name="scratch", value=False),),
    expect=_odd((0,), 1, "decided scratch=False because caught: out of memory"),
)
IDLE = replace(
    PAIR,
    name="decision/idle-by-own-queue",
    claim="A rank that sees no batch goes back to its control loop: it is in the next broadcast, its peer gathers.",
    source="sgl-project/sglang#33289",
    selector="idle-alone",
    faults=(Fact(rank=1, name="batch", value=False, step=1),),
    expect=_odd((1,), 5, "decided batch=False"),
)
PATH = Scenario(
    name="decision/kernel-on-own-device",
    claim="A rank whose device lacks the fast kernel gathers in another way than its peers.",
    kind=3,
    source="flashinfer-ai/flashinfer#5345, sgl-project/sglang-omni#2156",
    selector="choose-path",
    faults=(Fact(rank=1, name="supported", value=False),),
    expect=_odd((1,), 1, "decided fast_path=False because its device lacks the kernel"),
)

SCENARIOS = (
    CLOCK,
    replace(
        CLOCK,
        name="decision/expired-by-one-clock",
        claim="Where rank 0 says which requests are alive, the clock of rank 3 does no harm.",
        kind=0,
        selector="drop-by-first-clock",
        expect=(),
    ),
    MEMORY,
    replace(
        MEMORY,
        name="decision/capacity-of-smallest-memory",
        claim="Where the ranks take what the smallest of their memories holds, all answer three rows.",
        kind=0,
        selector="fit-smallest-memory",
        expect=(),
    ),
    GRAPH,
    replace(
        GRAPH,
        name="decision/graph-agreed",
        claim="A vote on the graph lets both ranks run eagerly.",
        kind=0,
        selector="pad-for-agreed-graph",
        expect=(),
    ),
    CAPTURE,
    replace(
        CAPTURE,
        name="decision/capture-agreed",
        claim="A rank that asks before it captures runs with its peer.",
        kind=0,
        selector="capture-together",
        expect=(),
    ),
    TACTICS,
    replace(
        TACTICS,
        name="decision/tactics-of-a-pair",
        claim="Between two ranks either may be at fault, too many barriers or too few: both are named, with why.",
        world_size=2,
        org_vocab_size=1024,
        expect=_odd((0, 1), 2, "decided tactics=13"),
    ),
    replace(
        TACTICS,
        name="decision/tactics-agreed",
        claim="Where rank 0 says how many tactics there are, all make as many barriers.",
        kind=0,
        selector="tune-together",
        expect=(),
    ),
    SCRATCH,
    replace(
        SCRATCH,
        name="decision/allocation-agreed",
        claim="A vote before the barrier lets all ranks go on without their scratch memory.",
        kind=0,
        selector="scratch-together",
        expect=(),
    ),
    IDLE,
    replace(
        IDLE,
        name="decision/idle-agreed",
        claim="Ranks that vote on the batch are idle together: an answer without a row is an answer.",
        kind=0,
        selector="idle-together",
        expect=(),
    ),
    PATH,
    replace(
        PATH,
        name="decision/kernel-agreed",
        claim="Ranks that ask each other first refuse alike, and name the one that lacks the kernel.",
        selector="agree-on-path",
        expect=(Expected(kind="crash_all", ranks=(0, 1, 2, 3), says="rank 1 lacks the kernel"),),
    ),
    replace(
        PATH,
        name="decision/kernel-nowhere",
        claim="Where no device has it, all ranks fall back alike, and nothing is wrong.",
        kind=0,
        faults=tuple(Fact(rank=rank, name="supported", value=False) for rank in range(4)),
        expect=(),
    ),
)
