"""Flight Recorder dumps of real NCCL hangs give the root cause that the ledgers of the same program give."""

import flight_programs
import pytest
import torch

from tpbed.harness.diagnose import diagnose
from tpbed.harness.flight import read_report
from tpbed.tp.simulated import SimulatedWorld

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("name", list(flight_programs.PROGRAMS))
def test_a_real_dump_of_nccl_gives_the_root_cause_that_the_ledgers_give(name, tmp_path):
    program, _ = flight_programs.PROGRAMS[name]
    run = SimulatedWorld(2).run(lambda rank: [work.wait() for work in program(rank)])
    (proved,) = diagnose(run.ledgers, run.liveness)
    flight_programs.leave_dumps(name, "nccl", 2, tmp_path)
    (found,) = read_report([tmp_path]).findings
    assert (found.kind, found.ranks, found.op, found.seq) == (proved.kind, proved.ranks, proved.op, proved.seq)
    assert found.group == proved.group
