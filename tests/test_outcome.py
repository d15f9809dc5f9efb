"""simulate: the verdict on any program in one call, as a value and as text."""

import re
import subprocess
import sys

import torch
import torch.distributed as dist
from rank_programs import raise_before, total

from tpbed.harness.outcome import simulate
from tpbed.tp.rank import current
from tpbed.tp.schedule import Replayed, Seeded


def test_a_program_that_is_right_is_ok_with_its_results():
    outcome = simulate(total, world_size=3)
    assert (outcome.ok, outcome.findings, outcome.run.results) == (True, (), (6, 6, 6))
    assert str(outcome) == "ok: 3 ranks returned"


def test_a_hang_is_a_finding_and_the_text_explains_it():
    outcome = simulate(raise_before)
    assert not outcome.ok
    assert [(finding.kind, finding.ranks) for finding in outcome.findings] == [("hang", (2,))]
    assert re.match(r"hang .*barrier seq 2 .*waits for rank 2", str(outcome))
    assert "rank 2 raised ValueError after barrier seq 1: on purpose" in str(outcome)


def test_the_schedule_is_used_and_its_choices_repeat_the_run():
    first = simulate(raise_before, schedule=Seeded(5))
    assert first.choices != simulate(raise_before).choices
    assert simulate(raise_before, schedule=Replayed(first.choices)).run.ledgers == first.run.ledgers


def test_the_device_reaches_the_ranks():
    outcome = simulate(lambda rank: current().device, world_size=2, device="meta")
    assert outcome.run.results == (torch.device("meta"),) * 2


def test_the_world_is_free_for_the_next_call():
    assert simulate(lambda rank: dist.barrier() if rank else None).findings
    assert simulate(total, world_size=2).ok


def test_a_verdict_does_not_load_ray():
    code = "import sys, tpbed.harness.outcome; sys.exit('ray' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
