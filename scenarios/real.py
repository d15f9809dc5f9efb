"""Real input: the head and hidden states of SmolLM2-135M-Instruct, and the vocabulary of Qwen3.8-27B."""

from dataclasses import replace

from tpbed.harness.scenario import Expected, Scenario

SMOLLM2 = Scenario(
    name="real/smollm2",
    claim="",
    kind=0,
    org_vocab_size=49152,
    hidden_size=576,
    logits="smollm2",
    rows=16,
    steps=2,
    stall_after_s=60.0,  # each rank reads the checkpoint once, which takes seconds
)
PADDED = 49_000  # pads to 49,024: the last rank has 24 columns that are no tokens

SCENARIOS = (
    *(
        replace(
            SMOLLM2,
            name=f"real/smollm2-{head}-tp{tp}",
            claim=f"The trained head in {head} at TP={tp}: candidates equal the reference, and all ranks agree.",
            world_size=tp,
            head=head,
        )
        for tp in (1, 2, 4)
        for head in ("bf16", "fp8")
    ),
    replace(
        SMOLLM2,
        name="real/smollm2-padded-tp4",
        claim="The trained head over its first 49,000 tokens: a padded tail on rank 3.",
        org_vocab_size=PADDED,
    ),
    replace(
        SMOLLM2,
        name="real/smollm2-fp8-cropped-tp4",
        claim="The trained FP8 head with that tail cropped: rank 3 raises alone, on real input too.",
        kind=1,
        source="sgl-project/sglang#35496",
        org_vocab_size=PADDED,
        head="fp8",
        selector="crop",
        expect=(Expected(kind="hang", ranks=(3,), seq=1, error="RuntimeError", says="input must be contiguous"),),
    ),
    Scenario(
        name="real/qwen3-vocabulary-tp4",
        claim="248,320 rows, the vocabulary of Qwen3.8-27B, at a reduced hidden size.",
        kind=0,
        org_vocab_size=248_320,
        hidden_size=64,
        logits="gaussian",
        rows=7,
        steps=1,
    ),
)
