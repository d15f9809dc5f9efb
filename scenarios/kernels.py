"""Top-k kernels with a defect of their own: where it reaches, and where the same kernel is right."""

from dataclasses import replace
from math import inf, nan

from tpbed.harness.faults import OtherTile, OtherTopK
from tpbed.harness.scenario import Expected, Overwrite, Scenario

WRONG = (Expected(kind="wrong_ids"),)


def _row(row: int, tokens: range, value: float) -> tuple[Overwrite, ...]:
    return tuple(Overwrite(row=row, token_id=token, value=value) for token in tokens)


ZEROS = Scenario(
    name="kernel/empty-slots-of-zero",
    claim="A kernel that gives value 0 where no finite logit is left lets that beat real logits below zero.",
    kind=6,
    source="flashinfer-ai/flashinfer#4123",
    org_vocab_size=130,
    logits="negative",
    topk="fills-with-zeros",
    expect=WRONG,
)
COUNTERS = Scenario(
    name="kernel/counters-left-to-the-next-row",
    claim="A row with fewer finite logits than k spoils the row after it, and no other.",
    kind=6,
    source="flashinfer-ai/flashinfer#2325",
    overwrites=_row(1, range(10, 256), -inf),
    topk="leaves-counters",
    expect=(Expected(kind="wrong_ids", says="row 2"),),
)
BUCKET = Scenario(
    name="kernel/bucket-overflows",
    claim="More columns in the bucket of the k-th best than its buffer has slots: some of the best are dropped.",
    kind=6,
    source="sgl-project/sglang#36807",
    world_size=1,
    topk="overflows-its-bucket",
    expect=WRONG,
)
WRAP = Scenario(
    name="kernel/row-offset-wraps",
    claim="An offset that overflows reads the first rows again: every id is in range, and of another row.",
    kind=6,
    source="pytorch/pytorch#95455, flashinfer-ai/flashinfer#2937",
    topk="wraps-rows",
    expect=(Expected(kind="wrong_ids", says="row 2"),),
)
INFINITY = Scenario(
    name="kernel/infinity-dropped-at-tp4",
    claim="A back end that is chosen for short rows drops an infinite logit: at TP=4 the shards are short.",
    kind=6,
    source="flashinfer-ai/flashinfer#4811",
    overwrites=(Overwrite(row=0, token_id=77, value=inf),),
    topk="drops-infinity-of-short-rows",
    expect=(Expected(kind="wrong_ids", says="token 77"),),
)
WIDE = Scenario(
    name="kernel/columns-in-16-bits",
    claim="Columns above 65,535 come back modulo 65,536: in range, so that only the reference sees it.",
    kind=6,
    source="tenstorrent/tt-metal#25359",
    world_size=2,
    org_vocab_size=140_000,
    hidden_size=4,
    rows=2,
    steps=1,
    topk="counts-in-16-bits",
    expect=WRONG,
)
THREE = Scenario(
    name="kernel/three-rows-deadlock",
    claim="A launch that cannot run 3 rows holds every rank in its top-k: no collective is open and no rank differs.",
    kind=8,
    source="vllm-project/vllm#51593, vllm-project/vllm#41189",
    world_size=2,
    org_vocab_size=1024,
    rows=3,
    topk="deadlocks-at-three-rows",
    expect=(Expected(kind="stall", ranks=(0, 1), says="deadlocks_at_three_rows"),),
)
NAN = Scenario(
    name="kernel/another-back-end-on-one-rank",
    claim="A rank that fell back to a kernel that ranks NaN last hides it: the other kernel is named, and the row.",
    kind=6,
    source="pytorch/pytorch#16762, pytorch/pytorch#117617, pytorch/pytorch#1810",
    overwrites=(Overwrite(row=2, token_id=300, value=nan),),
    faults=(OtherTopK(rank=1, topk="ranks-nan-last"),),
    expect=(Expected(kind="diverge", ranks=(1,), says="decided topk=ranks_nan_last"), Expected(kind="wrong_ids")),
)
LARGER = Scenario(
    name="kernel/ties-to-larger-ids",
    claim="Repeatable is not canonical: of ties at the k-th place a kernel may keep the larger ids, every time.",
    kind=6,
    source="flashinfer-ai/flashinfer#3095, flashinfer-ai/flashinfer#4295",
    logits="equal",
    topk="ties-to-larger-columns",
    expect=(Expected(kind="order"),),
)

SCENARIOS = (
    Scenario(
        name="kernel/masked-row-spins",
        claim="A search that never ends on a row of -inf holds the rank whose shard is all padding.",
        kind=8,
        source="flashinfer-ai/flashinfer#1049",
        org_vocab_size=130,
        topk="spins-on-masked-rows",
        expect=(Expected(kind="stall", ranks=(3,), op="all_gather", seq=1, says="spins_on_masked_rows"),),
    ),
    ZEROS,
    replace(
        ZEROS,
        name="kernel/empty-slots-below-the-rest",
        claim="Where enough real logits are above zero, the same zeros never surface.",
        kind=0,
        logits="distinct",
        expect=(),
    ),
    COUNTERS,
    replace(
        COUNTERS,
        name="kernel/counters-of-full-rows",
        claim="Rows that all have k finite logits leave nothing behind.",
        kind=0,
        overwrites=(),
        expect=(),
    ),
    BUCKET,
    replace(
        BUCKET,
        name="kernel/bucket-of-ties-overflows",
        claim="Ties fill the bucket too, and at TP=4 the shards have fewer of them: values are lost, not only ids.",
        source="flashinfer-ai/flashinfer#2605, flashinfer-ai/flashinfer#2604",
        world_size=4,
        org_vocab_size=4000,
        logits="tied",
    ),
    replace(
        BUCKET,
        name="kernel/bucket-of-a-narrow-shard",
        claim="The same kernel is right at the widths that tests have.",
        kind=0,
        world_size=4,
        org_vocab_size=200,
        expect=(),
    ),
    WRAP,
    replace(
        WRAP,
        name="kernel/row-offset-of-few-rows",
        claim="Below the row where it overflows the same kernel is right.",
        kind=0,
        rows=2,
        expect=(),
    ),
    INFINITY,
    replace(
        INFINITY,
        name="kernel/infinity-kept-at-tp1",
        claim="At TP=1 the row is long and the other back end answers: TP alone shows this one.",
        kind=0,
        world_size=1,
        expect=(),
    ),
    Scenario(
        name="kernel/k-read-too-wide",
        claim="An array of k for each row, read with twice its width, leaves the rows of its second half without any.",
        kind=6,
        source="flashinfer-ai/flashinfer#5347",
        topk="reads-k-too-wide",
        expect=(Expected(kind="wrong_ids", says="row 2"),),
    ),
    WIDE,
    replace(
        WIDE,
        name="kernel/columns-of-a-narrow-shard",
        claim="At TP=4 a shard of the same vocabulary has 35,008 columns, and 16 bits are enough.",
        kind=0,
        world_size=4,
        expect=(),
    ),
    Scenario(
        name="kernel/four-whatever-k-is",
        claim="A kernel that finds 4 candidates where 16 were asked for: what it left out is among the best.",
        kind=6,
        source="Atlas-Inf/atlas#46",
        topk="finds-four",
        expect=WRONG,
    ),
    THREE,
    replace(
        THREE,
        name="kernel/four-rows-run",
        claim="With 4 rows the same launch runs.",
        kind=0,
        rows=4,
        expect=(),
    ),
    Scenario(
        name="kernel/nan-repeats-an-id",
        claim="A kernel that a NaN holds at one column returns its id k times, and the row is not marked.",
        kind=6,
        source=(
            "flashinfer-ai/flashinfer#2402, vllm-project/vllm#40376, vllm-project/vllm#23814, vllm-project/vllm#39593"
        ),
        overwrites=(Overwrite(row=1, token_id=300, value=nan),),
        topk="repeats-an-id-at-nan",
        expect=(Expected(kind="wrong_ids", says="the row holds NaN"),),
    ),
    NAN,
    replace(
        NAN,
        name="kernel/another-back-end-without-nan",
        claim="Without a NaN both back ends agree, and still one rank has another than its peers.",
        overwrites=(),
        expect=(Expected(kind="diverge", ranks=(1,), says="decided topk=ranks_nan_last"),),
    ),
    Scenario(
        name="kernel/nan-made-a-number",
        claim="A row of NaN made one constant is a tie of the whole vocabulary: ids in range that mean nothing.",
        kind=6,
        source="sgl-project/sglang#33187, sgl-project/sglang#28829",
        org_vocab_size=130,
        overwrites=_row(2, range(130), nan),
        selector="sanitise-nan",
        expect=(Expected(kind="wrong_ids", says="row 2"),),
    ),
    Scenario(
        name="kernel/order-of-columns",
        claim="A kernel that returns the right k unsorted is no trouble to a merge that sorts.",
        kind=0,
        source="flashinfer-ai/flashinfer#4295",
        topk="by-column",
    ),
    LARGER,
    replace(
        LARGER,
        name="kernel/ties-to-larger-ids-as-sets",
        claim="The same choice is right where ties may be broken in any way.",
        kind=0,
        ties="equivalent",
        expect=(),
    ),
    Scenario(
        name="kernel/another-tile-on-one-rank",
        claim="Another order of the same sums on one rank changes last bits, and the gather brings them to all alike.",
        kind=0,
        source="flashinfer-ai/flashinfer#3186, sgl-project/sglang#23317",
        head="fp8",
        logits="gaussian",
        faults=(OtherTile(rank=1),),
    ),
)
