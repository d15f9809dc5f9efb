"""Kernels that must not be captured: each is caught, and the rank that has it is named. In processes of their own."""

import json

import pytest
import torch
from alone import run_alone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROGRAM = """
import ctypes, json, sys
import torch
import torch.nn.functional as F
from tpbed.harness.diagnose import diagnose
from tpbed.selector.head import DenseHead
from tpbed.selector.lattice import TransitionTables
from tpbed.selector.packed import keyed_topk
from tpbed.selector.sampler import DraftSampler
from tpbed.selector.shard import VocabShard
from tpbed.selector.walk import DraftParams, Noise
from tpbed.tp.simulated import SimulatedWorld

fault, culprit, world_size = sys.argv[1], 1, 2
VOCAB, UNITS, SLOTS = 1024, 64, 7
side = torch.cuda.Stream()
runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")

def draw(seed, *shape):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()

class Method:
    '''A product, and what must not be in a capture.'''

    def __init__(self, faulty):
        self.faulty = faulty

    def apply(self, layer, x, bias=None):
        if not self.faulty:
            return F.linear(x, layer.weight)
        if fault == "sync":
            x.sum().item()
        elif fault == "allocation":
            pointer = ctypes.c_void_p()
            runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(1 << 20))
        elif fault == "stream":
            out = x.new_empty(len(x), len(layer.weight))
            with torch.cuda.stream(side):
                torch.mm(x, layer.weight.t(), out=out)
            return out
        return F.linear(x, layer.weight)

def sampler(rank, **options):
    shard = VocabShard.even(rank, world_size, VOCAB)
    faulty = rank == culprit and not options.get("eager")
    head = DenseHead(weight=shard.shard_rows(draw(4, VOCAB, UNITS)), shard=shard, quant_method=Method(faulty))
    tables = TransitionTables(projection=draw(1, 8, UNITS), predecessor=draw(2, VOCAB, 8), successor=draw(3, VOCAB, 8))
    return DraftSampler(head, tables, k=16, slots=SLOTS, sizes=(2,), topk=keyed_topk, **options)

def batch(seed):
    every = torch.arange(2, device="cuda")
    params, noise = DraftParams.alike(2, device="cuda"), Noise(rule="gumbel", seeds=every, positions=every)
    return draw(seed, 2, SLOTS, UNITS), every, params, noise

def program(rank):
    captured, eager = sampler(rank), sampler(rank, eager=True)
    alike = []
    for seed in (10, 11):
        found, wanted = captured.propose(*batch(seed)), eager.propose(*batch(seed))
        alike.append(torch.equal(found.ids, wanted.ids))
    return alike

run = SimulatedWorld(world_size, device="cuda:0").run(program)
findings = diagnose(run.ledgers, run.liveness)
print(json.dumps({
    "results": run.results,
    "stuck": run.stuck,
    "findings": [[f.kind, f.ranks, [cause.text for cause in f.causes]] for f in findings],
}))
"""


def told(fault):
    ended = run_alone(PROGRAM.replace("sys.argv[1]", repr(fault)))
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_without_a_fault_the_same_program_proposes_what_is_proposed_without_a_graph():
    found = told("none")
    assert found == {"results": [[True, True]] * 2, "stuck": [], "findings": []}


@pytest.mark.parametrize("fault", ["sync", "allocation"])
def test_a_host_sync_or_an_allocation_in_capture_raises_on_its_rank_alone_which_the_diagnosis_names(fault):
    found = told(fault)
    assert found["stuck"] == [0]
    [[kind, ranks, [cause]]] = found["findings"]
    assert (kind, ranks) == ("hang", [1])
    assert "captur" in cause


def test_a_kernel_on_a_stream_that_is_not_captured_answers_for_old_inputs():
    """Nothing raises: that a graph is asked with new inputs, beside the eager path, is what finds it."""
    found = told("stream")
    assert found["findings"] == [] and found["stuck"] == []
    assert not all(found["results"][0])
