"""DraftSampler in CUDA graphs: what it proposes without them, for every head, at TP=1 and on simulated ranks."""

from dataclasses import replace

import pytest
import torch

from tpbed.selector.admission import admit
from tpbed.selector.fp8 import Fp8Head, Fp8Method, fits_scaled_mm
from tpbed.selector.head import DenseHead
from tpbed.selector.lattice import TransitionTables
from tpbed.selector.nvfp4 import Nvfp4Head, fits_triton
from tpbed.selector.packed import keyed_topk
from tpbed.selector.quantized import FORMATS
from tpbed.selector.sampler import DraftSampler, Eager
from tpbed.selector.shard import VocabShard
from tpbed.selector.topk import flashinfer_topk, has_flashinfer, torch_topk
from tpbed.selector.triton_topk import has_triton, triton_topk
from tpbed.selector.walk import DraftParams, Noise
from tpbed.tp.simulated import SimulatedWorld

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
VOCAB, UNITS, R, K, SLOTS = 4000, 256, 32, 16, 7
TOPKS = {"keyed": keyed_topk, "torch": torch_topk, "flashinfer": flashinfer_topk, "triton": triton_topk}
DENSE = {"dense": torch.bfloat16, "dense, float16": torch.float16, "dense, float32": torch.float32}
W8A16 = ["fp8", "fp8-tensor"]  # of these, W8A8 is what a device takes by itself
HEADS = [*DENSE, *FORMATS, *(f"{name}, W8A16" for name in W8A16)]


def draw(seed: int, *shape: int) -> torch.Tensor:
    """Small integers, whose sums are exact: then it does not matter how many rows a product has."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def sampler_of(
    rank: int = 0, world_size: int = 1, *, head: str = "dense", topk: str = "keyed", **options
) -> DraftSampler:
    shard, weight = VocabShard.even(rank, world_size, VOCAB, pad_to=128 * world_size), draw(4, VOCAB, UNITS)
    name, _, method = head.partition(", ")
    if head in DENSE:
        built = DenseHead.from_full(weight.to(DENSE[head]), shard, padding=9.0)
    else:
        built = FORMATS[name].head(FORMATS[name].pack(weight), shard)
        built = replace(built, quant_method=Fp8Method(quantize_activations=False)) if method else built
    tables = TransitionTables(projection=draw(1, R, UNITS), predecessor=draw(2, VOCAB, R), successor=draw(3, VOCAB, R))
    return DraftSampler(built, tables, k=K, slots=SLOTS, topk=TOPKS[topk], **options)


def batch(seed: int, requests: int, rule: str = "gumbel"):
    """Greedy and sampled requests in turn."""
    every = torch.arange(requests, device="cuda")
    params = DraftParams(
        temperature=every.remainder(2) * 500.0,
        top_k=torch.full_like(every, 9),
        top_p=torch.full_like(every, 0.95, dtype=torch.float32),
    )
    uniforms = torch.rand(requests, SLOTS, generator=torch.Generator().manual_seed(seed)).cuda()
    keyed = {"seeds": every + seed, "positions": every * 7}
    noise = Noise(rule="gumbel", **keyed) if rule == "gumbel" else Noise(rule="inverse_cdf", uniforms=uniforms)
    return draw(100 + seed, requests, SLOTS, UNITS), every * 3 % VOCAB, params, noise


def test_every_head_is_admitted_and_the_packed_ones_take_the_kernels_of_the_device():
    heads = {head: sampler_of(head=head, sizes=(1,))._head for head in HEADS}
    hidden = draw(1, 7, UNITS)
    assert {admit(head)[0] for head in heads.values()} == {"dense", "quantized"}
    w8a8 = [name for name in FORMATS if isinstance(heads[name], Fp8Head) and fits_scaled_mm(heads[name], hidden)]
    w4a16 = [name for name in FORMATS if isinstance(heads[name], Nvfp4Head) and fits_triton(heads[name], hidden)]
    assert w8a8 == W8A16
    assert w4a16 == (["nvfp4-ct", "nvfp4-modelopt"] if has_triton() else [])


def same(one, other) -> bool:
    pairs = (
        (one.draft.tokens, other.draft.tokens), (one.draft.q_rows, other.draft.q_rows), (one.ids, other.ids),
    )  # fmt: skip
    return all(torch.equal(found, wanted) for found, wanted in pairs)


@pytest.mark.parametrize("rule", ["gumbel", "inverse_cdf"])
@pytest.mark.parametrize("topk", list(TOPKS))
@pytest.mark.parametrize("head", HEADS)
def test_a_graph_proposes_what_is_proposed_without_one_batch_after_batch(head, topk, rule):
    if topk == "flashinfer" and not has_flashinfer():
        pytest.skip("flashinfer is not installed: pip install 'tpbed[gpu]'")
    captured = sampler_of(head=head, topk=topk, noise=rule)
    eager = sampler_of(head=head, topk=topk, noise=rule, eager=True)
    assert captured.captured and eager.reasons == (Eager.ASKED,)
    proposals = []
    for seed, requests in enumerate([8, 3, 5, 8, 1]):
        given = batch(seed, requests, rule)
        found = captured.propose(*given)
        assert found.eager is None and same(found, eager.propose(*given))
        proposals.append(found.draft.tokens.tolist())
    assert proposals[0] != proposals[3]  # new inputs, new outputs


def test_a_proposal_is_not_written_to_by_the_next_replay():
    sampler, given = sampler_of(), batch(0, 4)
    first = sampler.propose(*given)
    kept = first.draft.tokens.clone(), first.draft.q_rows.clone(), first.ids.clone()
    sampler.propose(*batch(5, 4))
    assert torch.equal(first.draft.tokens, kept[0]) and torch.equal(first.ids, kept[2])
    assert torch.equal(first.draft.q_rows, kept[1])


def test_a_batch_beyond_the_captured_size_is_proposed_eagerly_and_alike():
    given = batch(0, 11)
    found = sampler_of().propose(*given)
    assert found.eager is Eager.TOO_LARGE and same(found, sampler_of(sizes=(16,)).propose(*given))


@pytest.mark.parametrize("merge", ["two_gather", "packed", "full_gather"])
@pytest.mark.parametrize(
    ("world_size", "head", "topk"),
    [(2, "dense", "keyed"), (8, "dense", "triton"), *[(4, head, "triton") for head in HEADS]],
)
def test_simulated_ranks_capture_what_lies_before_and_after_the_collectives(world_size, head, topk, merge):
    given = batch(1, 3)

    def program(rank: int):
        sampler = sampler_of(rank, world_size, head=head, topk=topk, merge=merge)
        assert sampler.captured
        sampler.propose(*batch(7, 5))  # leaves the buffers full
        found = sampler.propose(*given)
        assert found.eager is None
        eager = sampler_of(rank, world_size, head=head, topk=topk, merge=merge, eager=True)
        return same(found, eager.propose(*given)), found.ids.tolist()

    results = SimulatedWorld(world_size, device="cuda:0").run(program)
    assert all(end is not None and end.how == "returned" for end in (ledger.end for ledger in results.ledgers)), [
        ledger.end for ledger in results.ledgers
    ]
    assert all(alike for alike, _ in results.results)
    assert len({str(ids) for _, ids in results.results}) == 1
