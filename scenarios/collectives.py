"""What ranks bring to collectives, in which order and through which groups; and errors that collectives hide."""

from dataclasses import replace

from tpbed.harness.faults import Exit, Fact, Leave, Raise
from tpbed.harness.scenario import Expected, Scenario

PAIR = Scenario(name="", claim="", kind=2, world_size=2, org_vocab_size=1024)

WIDTH = replace(
    PAIR,
    name="collective/broadcast-of-another-width",
    claim="A broadcast of 1 column received as 8: both ranks are inside it, and only what they bring tells them apart.",
    source="vllm-project/vllm#46994",
    selector="broadcast-own-width",
    faults=(Fact(rank=0, name="width", value=1, step=1),),
    expect=(Expected(kind="mismatch", ranks=(0,), op="broadcast", seq=4, says="(4, 1), not int64 (4, 8)"),),
)
FLAG = replace(
    PAIR,
    name="collective/flag-in-place-of-values",
    claim="A rank that has failed sends a flag where values are gathered: another dtype and shape.",
    source="NVIDIA/TensorRT-LLM#7507",
    selector="sentinel-flag",
    faults=(Fact(rank=1, name="fails", value=True, step=1),),
    expect=(Expected(kind="mismatch", ranks=(1,), seq=3, says="bool (1, 1), not float32 (4, 16)"),),
)
SET = Scenario(
    name="collective/set-order-of-equal-bytes",
    claim="Two gathers of equal bytes in the order of a set: their dtypes tell that one rank swaps them.",
    kind=2,
    source="radixark/miles#3194",
    selector="set-order-int32",
    faults=(Fact(rank=1, name="first", value="ids", step=1),),
    expect=(Expected(kind="mismatch", ranks=(1,), seq=3, says="int32"),),
)
CHANNELS = replace(
    PAIR,
    name="collective/first-large-gather-is-live",
    claim="Warmed up with one row, a rank that cannot connect for four fails in the middle of a step.",
    kind=8,
    source="vllm-project/vllm#48568",
    selector="warm-up-one-row",
    faults=(Fact(rank=1, name="channels_for_4_rows", value=False),),
    expect=(Expected(kind="hang", ranks=(1,), op="all_gather", seq=2, says="no channels for 4 rows"),),
)
HANDLES = Scenario(
    name="collective/error-behind-an-exchange",
    claim="An exit that exchanges handles on errors too holds the error back: the rank is named, and the error.",
    kind=1,
    source="sgl-project/sglang#11275",
    selector="exchange-on-any-exit",
    faults=(Fact(rank=1, name="capture_fails", value=True),),
    expect=(Expected(kind="mismatch", ranks=(1,), seq=1, says="operation not permitted when stream is capturing"),),
)
MONITORED = Scenario(
    name="collective/monitored-barrier",
    claim="Two ranks that do not come to a monitored barrier are both named, with what befell them.",
    kind=1,
    source="pytorch/pytorch#55010, pytorch/pytorch#53773, ray-project/ray#29562",
    worlds=("sim", "gloo"),
    selector="meet-monitored",
    faults=(Leave(rank=1, step=1), Leave(rank=3, step=1)),
    expect=(Expected(kind="hang", ranks=(1, 3), op="monitored_barrier", seq=4, says="rank 3 returned"),),
)
GROUPS = Scenario(
    name="collective/dies-between-two-groups",
    claim="A rank that leaves is waited for in two groups at once: it alone is named, and both groups end.",
    kind=9,
    source="NVIDIA/nccl#1013, NVIDIA/nccl#1777, pytorch/pytorch#132696",
    selector="two-groups",
    faults=(Exit(rank=2, seq=3),),
    expect=(Expected(kind="hang", ranks=(2,), says="exit status 1"),),
)
ARRIVAL = Scenario(
    name="collective/read-before-written",
    claim="A rank that reads a peer's buffer too early merges what lay there a step before: it alone is named.",
    kind=8,
    source="ztxz16/fastllm#725",
    selector="merge-by-arrival",
    faults=(Fact(rank=0, name="reads_too_early", value=True, step=1),),
    expect=(Expected(kind="diverge", ranks=(0,)),),
)

SCENARIOS = (
    WIDTH,
    replace(
        WIDTH,
        name="collective/broadcast-of-a-said-width",
        claim="Where rank 0 says first how wide it is, all receive as much.",
        kind=0,
        selector="broadcast-said-width",
        expect=(),
    ),
    FLAG,
    replace(
        FLAG,
        name="collective/nan-in-place-of-values",
        claim="A sentinel of the same dtype and shape reaches everybody, and all raise alike.",
        kind=10,
        selector="sentinel-nan",
        expect=(Expected(kind="crash_all", ranks=(0, 1), says="a rank has failed before the gather"),),
    ),
    SET,
    replace(
        SET,
        name="collective/set-order-of-one-dtype",
        claim="The same at one call site and in one dtype leaves no trace but the results: the rank is named by these.",
        selector="set-order-float32",
        expect=(Expected(kind="diverge", ranks=(1,)), Expected(kind="wrong_ids", says="step 1")),
    ),
    replace(
        SET,
        name="collective/same-order",
        claim="The same program where all sets have the same order is right.",
        kind=0,
        selector="set-order-float32",
        faults=(),
        expect=(),
    ),
    CHANNELS,
    replace(
        CHANNELS,
        name="collective/first-large-gather-is-warm-up",
        claim="Warmed up with as many rows as a step has, the same failure is tried again before anybody waits.",
        kind=0,
        selector="warm-up-all-rows",
        expect=(),
    ),
    HANDLES,
    replace(
        HANDLES,
        name="collective/error-before-an-exchange",
        claim="An exit that exchanges them in good order alone lets the error out: a hang with its cause.",
        selector="exchange-in-good-order",
        expect=(Expected(kind="hang", ranks=(1,), seq=1, error="RuntimeError", says="stream is capturing"),),
    ),
    replace(
        HANDLES,
        name="collective/exchange",
        claim="Where no capture fails, all ranks exchange their handles.",
        kind=0,
        faults=(),
        expect=(),
    ),
    Scenario(
        name="collective/error-behind-a-teardown",
        claim="A teardown in a finally block meets the peers' gather and hides why the rank left: its error is told.",
        kind=1,
        source="sgl-project/SpecForge#781, pytorch/pytorch#75097, pytorch/pytorch#180611",
        selector="tear-down-at-last",
        faults=(Raise(rank=2, seq=2, message="device assert"),),
        expect=(Expected(kind="mismatch", ranks=(2,), seq=2, says="InjectedError is on its way out: device assert"),),
    ),
    MONITORED,
    replace(
        MONITORED,
        name="collective/monitored-barrier-met",
        claim="Ranks that all come to it go on.",
        kind=0,
        faults=(),
        expect=(),
    ),
    GROUPS,
    replace(
        GROUPS,
        name="collective/two-groups-crossed",
        claim="Two ranks that enter two groups in opposite orders wait for each other, and all others for them.",
        kind=2,
        faults=(Fact(rank=3, name="pair_last", value=True, step=1),),
        expect=(Expected(kind="hang", ranks=(2, 3), says="in a circle"),),
    ),
    replace(
        GROUPS,
        name="collective/two-groups",
        claim="Two groups that all ranks enter in one order are no trouble.",
        kind=0,
        faults=(),
        expect=(),
    ),
    ARRIVAL,
    replace(
        ARRIVAL,
        name="collective/read-when-written",
        claim="The same program without the race is right.",
        kind=0,
        faults=(),
        expect=(),
    ),
    replace(
        PAIR,
        name="collective/pairs",
        claim="Values and ids in one gather, k of each from every rank, are right if they are read as they lie.",
        kind=0,
        source="NVIDIA/TensorRT-LLM#18155",
        selector="pairs",
    ),
    replace(
        PAIR,
        name="collective/pairs-laid-under-one-another",
        claim="The same pairs laid rank under rank and read row by row are those of other rows.",
        kind=5,
        source="NVIDIA/TensorRT-LLM#18155",
        selector="pairs-by-rows",
        expect=(Expected(kind="wrong_ids"),),
    ),
    replace(
        PAIR,
        name="collective/pairs-of-an-odd-chunk",
        claim="k values and k-1 ids from every rank, read as pairs of k: ids are taken for values.",
        kind=5,
        source="NVIDIA/TensorRT-LLM#18155",
        selector="pairs-one-id-less",
        expect=(Expected(kind="wrong_ids"),),
    ),
)
