"""Ranks meet in the same collective with different calls: pairing shifts, data is mixed, often without an error."""

from tpbed.harness.faults import Extra, Narrow, Recast, Rows, Skip, Strided
from tpbed.harness.scenario import Expected, Scenario


def _odd(rank: int, seq: int, says: str | None = None) -> tuple[Expected, ...]:
    return (Expected(kind="mismatch", ranks=(rank,), op="all_gather", seq=seq, says=says),)


SCENARIOS = (
    Scenario(
        name="mismatch/skips-one-gather",
        claim="A rank that skips one gather meets its peers' values with its ids; it is named where the shift begins.",
        kind=2,
        source="vllm-project/vllm#43547",
        faults=(Skip(rank=2, seq=3),),
        expect=_odd(2, 3, "int64"),
    ),
    Scenario(
        name="mismatch/skips-a-whole-step",
        claim="A rank that skips both gathers of a step is one step ahead: shapes match, and the step labels do not.",
        kind=2,
        source="vllm-project/vllm#43547",
        faults=(Skip(rank=2, seq=3, times=2),),
        expect=_odd(2, 3, "out of step"),
    ),
    Scenario(
        name="mismatch/extra-gather",
        claim="A rank that gathers once more than its peers is named, and not the peers that seem to lack a call.",
        kind=2,
        source="flashinfer-ai/flashinfer#3186",
        faults=(Extra(rank=1, seq=3),),
        expect=_odd(1, 4, "float32"),
    ),
    Scenario(
        name="mismatch/local-fast-path",
        claim="A path chosen by each rank's own padding gathers another shape and dtype; the decision is shown.",
        kind=3,
        source="flashinfer-ai/flashinfer#5345",
        selector="local-fast-path",
        expect=_odd(3, 1, "decided fast_path=False"),
    ),
    Scenario(
        name="mismatch/k-clipped-to-own-shard",
        claim="k clipped to a shard's real columns makes the width of the gather depend on the rank.",
        kind=3,
        source="vllm-project/vllm-ascend#16628",
        org_vocab_size=130,
        selector="clip-k-to-shard",
        expect=_odd(3, 1),
    ),
    Scenario(
        name="mismatch/rows-differ",
        claim="A rank that keeps one row less in a step is named by its shape.",
        kind=3,
        source="sgl-project/sglang#27221",
        faults=(Rows(rank=3, step=1, rows=3),),
        expect=_odd(3, 3, "(3, 16), not float32 (4, 16)"),
    ),
    Scenario(
        name="mismatch/rows-differ-pair",
        claim="Between two ranks the one whose shape is new is named, as there is no majority.",
        kind=3,
        source="vllm-project/vllm#31307, vllm-project/vllm#31154",
        world_size=2,
        org_vocab_size=1024,
        faults=(Rows(rank=1, step=1, rows=3),),
        expect=_odd(1, 3),
    ),
    Scenario(
        name="mismatch/swapped-gathers",
        claim="The order of two gathers differs between ranks: the odd rank is named by its dtype.",
        kind=3,
        source="radixark/miles#3194",
        world_size=3,
        pad_to=192,
        selector="swapped-gathers",
        expect=_odd(1, 1, "int64"),
    ),
    Scenario(
        name="mismatch/same-bytes-other-dtype",
        claim="int32 where the peers send float32 has as many bytes and would pass in silence.",
        kind=2,
        source="NVIDIA/TensorRT-LLM#7507",
        faults=(Recast(rank=1, seq=1, dtype="int32"),),
        expect=_odd(1, 1, "int32"),
    ),
    Scenario(
        name="mismatch/one-column-less",
        claim="k=15 on one rank and 16 on the others: a mismatch however it ends.",
        kind=3,
        source="NVIDIA/nccl#1417",
        faults=(Narrow(rank=0, seq=1),),
        expect=_odd(0, 1, "(4, 15)"),
    ),
    Scenario(
        name="mismatch/strided-contribution",
        claim="A view with holes passes on gloo; the stride contract says that NCCL would raise on this rank alone.",
        kind=1,
        source="flashinfer-ai/flashinfer#1866",
        worlds=("sim", "gloo"),
        faults=(Strided(rank=1, seq=1),),
        expect=_odd(1, 1, "Tensors must be contiguous"),
    ),
    Scenario(
        name="mismatch/permuted-contribution",
        claim="A transposed view passes NCCL's check and is sent as its memory lies: the stride contract says so.",
        kind=2,
        source="pytorch/pytorch#76142",
        worlds=("sim", "gloo"),
        faults=(Strided(rank=2, seq=1, transposed=True),),
        expect=_odd(2, 1, "permuted"),
    ),
)
