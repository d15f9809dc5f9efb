"""The bug that tpbed began with, on real kernels: a packed head's padded tail, cropped instead of masked."""

import pytest
import torch
import torch.distributed as dist

from tpbed.harness.diagnose import diagnose
from tpbed.harness.mutants import SELECTORS
from tpbed.harness.selectors import made
from tpbed.selector.project import project_candidate_logits
from tpbed.selector.quantized import FORMATS, Fp8Head
from tpbed.selector.reference import reference_topk
from tpbed.selector.select import compute_candidates
from tpbed.selector.shard import VocabShard
from tpbed.selector.topk import flashinfer_topk, has_flashinfer
from tpbed.selector.triton_topk import triton_topk
from tpbed.tp.rank import current
from tpbed.tp.simulated import SimulatedWorld

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_flashinfer(), reason="flashinfer is not installed: pip install 'tpbed[gpu]'"),
]
TOKENS, UNITS, K, ROWS = 1000, 128, 16, 8  # 1000 pads to 1024: rank 3 of 4 holds 232 tokens and 24 rows of padding
HEADS = ["fp8", "fp8-tensor", "nvfp4-ct"]


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def head_of(name: str, rank: int, world_size: int):
    """As a checkpoint has it, on the device, with the method of its own: FP8 products are torch._scaled_mm there."""
    packed = {key: value.cuda() for key, value in FORMATS[name].pack(draw(1, TOKENS, UNITS)).items()}
    return FORMATS[name].head(packed, VocabShard.even(rank, world_size, TOKENS))


def notes(name, value, because):
    pass


@pytest.mark.parametrize("name", HEADS)
def test_cropped_at_tp_1_the_kernel_itself_refuses_the_strided_view(name):
    hidden, options = draw(2, ROWS, UNITS).cuda(), {"k": K, "group": None, "topk": flashinfer_topk, "note": notes}
    with pytest.raises(RuntimeError, match="contiguous"):
        made(SELECTORS["crop"])(hidden, head_of(name, 0, 1), **options)


@pytest.mark.parametrize("name", HEADS)
def test_cropped_at_tp_4_only_the_tail_rank_raises_and_the_diagnosis_names_it(name):
    def program(rank: int):
        hidden = draw(2, ROWS, UNITS).to(current().device)
        options = {"k": K, "group": dist.group.WORLD, "topk": flashinfer_topk, "note": current().recorder.decision}
        made(SELECTORS["crop"])(hidden, head_of(name, rank, 4), **options)

    run = SimulatedWorld(4, device="cuda:0").run(program)
    assert run.stuck == (0, 1, 2)
    [finding] = diagnose(run.ledgers, run.liveness)
    assert (finding.kind, finding.ranks, finding.op) == ("hang", (3,), "all_gather")
    [cause] = finding.causes
    assert "RuntimeError" in cause.text and "contiguous" in cause.text


@pytest.mark.parametrize("topk", [flashinfer_topk, triton_topk])
@pytest.mark.parametrize("merge", ["two_gather", "packed"])
@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("name", HEADS)
def test_masked_every_rank_has_the_best_of_the_logits_that_the_ranks_computed(name, world_size, merge, topk):
    def program(rank: int):
        hidden, head = draw(2, ROWS, UNITS).to(current().device), head_of(name, rank, world_size)
        found = compute_candidates(hidden, head, k=K, group=None, topk=topk, merge=merge)
        own = project_candidate_logits(hidden, head)[:, : head.shard.num_org]
        return found.ids.cpu(), found.values.cpu(), own.float().cpu()

    results = SimulatedWorld(world_size, device="cuda:0").run(program).results
    ids, values = reference_topk(torch.cat([own for *_, own in results], dim=1), K)
    for found_ids, found_values, _ in results:
        assert torch.equal(found_values.double(), values)
        if topk is triton_topk:  # the kernel of flashinfer chooses among equals as it likes
            assert torch.equal(found_ids, ids)


@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_fp8_products_quantize_activations_and_stay_near_the_products_that_do_not(granularity):
    weight, hidden = draw(1, TOKENS, UNITS).cuda(), draw(2, ROWS, UNITS).cuda()
    head = Fp8Head.from_full(weight, VocabShard.even(0, 1, TOKENS), granularity=granularity)
    found = project_candidate_logits(hidden, head)[:, :TOKENS].float()
    exact = hidden.double() @ (weight.double().T)
    apart = (found - exact).abs().max() / exact.abs().max()
    assert 0 < apart < 0.1
