"""triton_topk on a device: real sizes, streams, graphs; its rules are in tests/test_triton_topk.py."""

import pytest
import torch

from tpbed.selector.packed import pack_keys
from tpbed.selector.topk import canonical_topk
from tpbed.selector.triton_topk import TritonTopK, has_triton, triton_topk

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="triton is not installed: install a torch that is built for CUDA"),
]
PLACE = "cuda"


def expected_keys(logits, k, num_org, first_id):
    values, columns = canonical_topk(logits[:, :num_org].cpu(), k)
    return pack_keys(values, columns + first_id)


def test_more_rows_than_a_grid_has_in_its_second_dimension():
    logits = torch.randn(70_000, 40, generator=torch.Generator().manual_seed(4)).bfloat16()
    found = TritonTopK(group=32).keys(logits.to(PLACE), 5, num_org=33)
    assert torch.equal(found.cpu(), expected_keys(logits, 5, 33, 0))


@pytest.mark.parametrize("columns", [31_040, 248_320])
def test_a_real_vocabulary(columns):
    logits = torch.randn(7, columns, generator=torch.Generator().manual_seed(5)).bfloat16()
    found = triton_topk.keys(logits.to(PLACE), 16, num_org=columns - 61, first_id=columns)
    assert torch.equal(found.cpu(), expected_keys(logits, 16, columns - 61, columns))


def test_streams_that_overlap_do_not_disturb_each_other():
    draw = torch.Generator().manual_seed(6)
    given = [torch.randn(56, 31_040, generator=draw).bfloat16() for _ in range(2)]
    placed = [logits.to(PLACE) for logits in given]
    streams = [torch.cuda.Stream() for _ in given]
    triton_topk.keys(placed[0], 16, num_org=31_040)
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(50):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[which].append(triton_topk.keys(placed[which], 16, num_org=31_040))
    torch.cuda.synchronize()
    for which, logits in enumerate(given):
        wanted = expected_keys(logits, 16, 31_040, 0)
        assert all(torch.equal(keys.cpu(), wanted) for keys in found[which])


def test_a_replayed_graph_answers_for_new_logits():
    static = torch.zeros(7, 31_040, device=PLACE, dtype=torch.bfloat16)
    triton_topk.keys(static, 16, num_org=31_000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keys = triton_topk.keys(static, 16, num_org=31_000)
    for seed in range(3):
        logits = torch.randn(7, 31_040, generator=torch.Generator().manual_seed(seed)).bfloat16()
        static.copy_(logits)
        graph.replay()
        assert torch.equal(keys.cpu(), expected_keys(logits, 16, 31_000, 0))
