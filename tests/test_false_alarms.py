"""No false alarm: healthy ranks with random delays of up to 10 s, watched on a clock of the test's, end without a word.

Simulated here are a rank's events, what can be seen of its threads, and a driver that looks late and at no one moment;
real are RunWatch, which decides, and diagnose, which reads the ledgers it leaves.
"""

import itertools
import random
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from test_run_watch import done, end, joined, threads

from tpbed.harness.diagnose import diagnose
from tpbed.tp.blackbox import format_event
from tpbed.tp.rank import current
from tpbed.tp.reading import Reading
from tpbed.tp.run_watch import RunWatch
from tpbed.tp.simulated import SimulatedWorld

RANKS, STEPS, RUNS, LONGEST_S = 4, 20, 125, 9.99
GROUP = ("group", "world", list(range(RANKS)))


@dataclass
class Timeline:
    """What one rank does and when; awake: the spans in which it has been woken and has no processor yet."""

    events: list[tuple[float, tuple]] = field(default_factory=list)
    awake: list[tuple[float, float]] = field(default_factory=list)
    read: int = 0

    def reading(self, now: float) -> Reading:
        new = list(itertools.takewhile(lambda event: event[0] <= now, self.events[self.read :]))
        self.read += len(new)
        last = self.events[self.read - 1][0]
        runnable = any(begin <= now <= until for begin, until in self.awake)
        return Reading(
            events=b"".join(format_event(event) for _, event in new),
            count=self.read,
            truncated=False,
            quiet_ns=int((now - last) * 1e9),
            stopped=False,
            threads=threads(main_slices=self.read, main_runnable=runnable, runnable=runnable),
        )


def healthy_timelines(chance: random.Random, began: float) -> list[Timeline]:
    """Steps of one barrier each; a rank that has all it waited for gets a processor up to 3 s later."""
    lines = [Timeline([(began, GROUP)]) for _ in range(RANKS)]
    for seq in range(1, STEPS + 1):
        joins = [line.events[-1][0] + chance.uniform(0, LONGEST_S) * chance.random() ** 4 for line in lines]
        complete = max(joins)
        for line, join in zip(lines, joins, strict=True):
            late = chance.uniform(0, 3) * chance.random() ** 4
            line.events += [(join, joined(seq)), (complete + late, done(seq))]
            line.awake.append((complete, complete + late))
    for line in lines:
        line.events.append((line.events[-1][0], end("returned")))
    return lines


def follow(watch: RunWatch, lines: list[Timeline], chance: random.Random, now: float) -> tuple[bool, float]:
    """Look, as a driver does that may lose its processor; whether all ended before it judged otherwise."""
    while watch.open_ranks:
        now += watch.look_s + chance.uniform(0, 2) * chance.random() ** 8
        for rank in watch.open_ranks:
            reading = lines[rank].reading(now)
            ended = lines[rank].read == len(lines[rank].events)
            (watch.deliver if ended else watch.read)(rank, reading, now)
            now += chance.uniform(0, 0.001)
        if watch.judge(now):
            break
    return not watch.open_ranks, now


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_are_late_by_up_to_the_deadline_are_never_called_stuck(seed):
    chance, now = random.Random(seed), 100.0
    for _ in range(RUNS // 4):
        lines, watch = healthy_timelines(chance, now), RunWatch(RANKS, 10.0, now)
        ended, now = follow(watch, lines, chance, now)
        assert ended and watch.stuck == () and watch.proof_ms is None
        assert diagnose(watch.ledgers, watch.liveness({})) == ()


def test_the_same_watch_does_find_a_rank_that_is_late_beyond_the_deadline():
    chance, now = random.Random(0), 100.0
    lines, watch = healthy_timelines(chance, now), RunWatch(RANKS, 10.0, now)
    place = next(number for number, (_, event) in enumerate(lines[2].events) if event[0] == "start" and event[2] == 5)
    del lines[2].events[place:]
    for line in lines:
        line.events = [event for event in line.events if event[1][0] not in ("start", "state") or event[1][2] <= 5]
        line.events = [event for event in line.events if event[1][:4] != ("state", "world", 5, "completed")]
        line.events = [event for event in line.events if event[1][0] != "end"]
    lines = [Timeline(line.events) for line in lines]
    for line in lines:
        line.events.append((1e9, end("returned")))
    ended, _ = follow(watch, lines, chance, now)
    assert not ended
    assert [finding.ranks for finding in diagnose(watch.ledgers, watch.liveness({}))] == [(2,)]


def test_ten_thousand_steps_with_delays_on_simulated_ranks_have_no_finding():
    def program(rank: int) -> None:
        chance = random.Random(rank)
        for _ in range(250):
            current().sleep(chance.uniform(0, 10))
            dist.all_reduce(torch.ones(1))

    world = SimulatedWorld(RANKS)
    for _ in range(10):  # times 4 ranks times 250 steps
        run = world.run(program)
        assert diagnose(run.ledgers, run.liveness) == ()
