"""Speculative decoding and sampling: what ranks draft, accept and pick, each for itself or as one."""

from dataclasses import replace

from tpbed.harness.faults import Fact
from tpbed.harness.scenario import Expected, Scenario

PAIR = Scenario(name="", claim="", kind=4, world_size=2, org_vocab_size=1024)
NEAR_TIE = (Fact(rank=1, name="ulps_of_row_3", value=2, step=0),)
IDLE_AT = (3, 9, 14)

VERIFY = replace(
    PAIR,
    name="drafting/accepted-by-own-logits",
    claim="A near-tie that one rank rounds otherwise accepts a token less there: its next step has a row less.",
    source="sgl-project/sglang#31071",
    selector="verify-alone",
    faults=NEAR_TIE,
    expect=(Expected(kind="mismatch", ranks=(1,), op="all_gather", seq=3, says="decided accepted=3"),),
)
OVERRIDE = replace(
    PAIR,
    name="drafting/override-after-broadcast",
    claim="A length that is set by hand after the broadcast undoes it: agreement came too early.",
    source="sgl-project/sglang#33614",
    selector="override-after-broadcast",
    faults=(Fact(rank=1, name="override", value=2, step=0),),
    expect=(Expected(kind="mismatch", ranks=(1,), op="all_gather", seq=4, says="decided accepted=2"),),
)
PROPOSE = Scenario(
    name="drafting/proposed-by-each-rank",
    claim="Two ranks whose own proposers find more and less than the others bring other rows, and both are named.",
    kind=4,
    source="vllm-project/vllm#31307, vllm-project/vllm#31154",
    selector="propose-alone",
    faults=(Fact(rank=1, name="drafted", value=3), Fact(rank=2, name="drafted", value=2)),
    expect=(Expected(kind="mismatch", ranks=(1, 2), seq=1, says="its own proposer found 2"),),
)
DRAFT = replace(
    PAIR,
    name="drafting/cut-short-on-one-rank",
    claim="A rank that drafts once where its peer drafts three times is a step ahead of it while all shapes match.",
    kind=2,
    source=("vllm-project/vllm#40589, vllm-project/vllm#44954, vllm-project/vllm#44185, RBLN-SW/vllm-rbln#792"),
    selector="draft-while-it-fits",
    faults=(Fact(rank=1, name="draft_steps", value=1, step=1),),
    expect=(Expected(kind="mismatch", ranks=(1,), seq=9, says="decided draft_steps=1"),),
)
IDLE = replace(
    PAIR,
    name="drafting/idle-step-skipped",
    claim="A rank that returns from steps without a token drifts apart; the first such step is named, not the last.",
    kind=2,
    source="vllm-project/vllm#43547",
    rows=2,
    steps=16,
    selector="return-when-idle",
    faults=tuple(Fact(rank=1, name="tokens", value=0, step=step) for step in IDLE_AT),
    expect=(Expected(kind="mismatch", ranks=(1,), seq=7, says="decided idle=True because it has 0 tokens"),),
)
SAMPLE = Scenario(
    name="drafting/sampled-by-each-rank",
    claim="Ranks that each draw by a seed of their own commit other tokens although their candidates are equal.",
    kind=4,
    source="openai/gpt-oss#270, openai/gpt-oss#285, PaddlePaddle/FastDeploy#7096",
    selector="sample-by-rank",
    expect=(Expected(kind="diverge", ranks=(0, 1, 2, 3), says="picked"),),
)
UNSEEDED = replace(
    SAMPLE,
    name="drafting/unseeded-and-committed",
    claim="A rank without the common seed commits other tokens than its peers, and is named with its seed.",
    source="vllm-project/vllm#17929, flagos-ai/vllm-plugin-FL#318",
    selector="sample-alone",
    faults=(Fact(rank=1, name="seed", value=7),),
    expect=(Expected(kind="diverge", ranks=(1,), says="because its generator has seed 7"),),
)

SCENARIOS = (
    VERIFY,
    replace(
        VERIFY,
        name="drafting/accepted-as-one",
        claim="The same near-tie under a broadcast: what rank 0 accepts sets the next step's rows on all ranks.",
        kind=0,
        selector="verify-together",
        expect=(),
    ),
    OVERRIDE,
    replace(
        OVERRIDE,
        name="drafting/override-before-broadcast",
        claim="Set before the broadcast, the same override does no harm.",
        kind=0,
        selector="override-before-broadcast",
        expect=(),
    ),
    PROPOSE,
    replace(
        PROPOSE,
        name="drafting/proposed-by-rank-0",
        claim="Where all verify what rank 0 proposes, other proposers may find what they like.",
        kind=0,
        selector="propose-together",
        expect=(),
    ),
    DRAFT,
    replace(
        DRAFT,
        name="drafting/cut-short-at-the-end",
        claim="Cut short in the last step, nothing follows that the peer could meet: it waits, and the rank is named.",
        faults=(Fact(rank=1, name="draft_steps", value=1, step=2),),
        expect=(Expected(kind="hang", ranks=(1,), seq=15, says="decided draft_steps=1"),),
    ),
    replace(
        DRAFT,
        name="drafting/cut-short-on-all-ranks",
        claim="Ranks that draft as often as fits on each of them stay together.",
        kind=0,
        selector="draft-while-all-fit",
        expect=(),
    ),
    IDLE,
    replace(
        IDLE,
        name="drafting/idle-step-joined",
        claim="A rank without a token that runs the step on dummy rows leaves nobody behind.",
        kind=0,
        selector="join-when-idle",
        expect=(),
    ),
    SAMPLE,
    replace(
        SAMPLE,
        name="drafting/sampled-and-broadcast",
        claim="Rank 0's pick, broadcast, is everybody's.",
        kind=0,
        source="openai/gpt-oss#270, PaddlePaddle/FastDeploy#7096",
        selector="sample-and-broadcast",
        faults=tuple(Fact(rank=rank, name="seed", value=rank) for rank in range(4)),
        expect=(),
    ),
    UNSEEDED,
    replace(
        UNSEEDED,
        name="drafting/unseeded-and-dropped",
        claim="Where only rank 0's tokens are taken, another seed elsewhere is no trouble.",
        kind=0,
        selector="sample-for-first",
        expect=(),
    ),
)
