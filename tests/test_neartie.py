"""Near ties: every figure on examples made by hand, controls that mutants break, and the answer in words."""

import json
from math import erf, sqrt

import pytest
import torch

from tpbed.harness import cli, neartie, neartie_cli, smollm2
from tpbed.harness.flips import (
    Bin,
    fit_sigma,
    flip_chance,
    flip_curve,
    fork_chance,
    in_ulps,
    mcnemar,
    most_likely_below,
    near_tie_rates,
    phi,
)
from tpbed.harness.neartie import PLAIN, Choice, Heads, Reference, Rows, Setting
from tpbed.selector import Candidates, DenseHead, compute_candidates

NAMES = {"source": "made", "head": "bf16"}
TOKENS, UNITS = 512, 32


def weight():
    return torch.randn(TOKENS, UNITS, generator=torch.Generator().manual_seed(1)).bfloat16()


def states(rows=60):
    return torch.randn(rows, UNITS, generator=torch.Generator().manual_seed(2)).bfloat16()


def tied_logits(rows=6):
    """Each value stands at 16 tokens, four of them in each quarter of the vocabulary."""
    return (torch.arange(TOKENS) % 32).expand(rows, -1).bfloat16().contiguous()


def a_reference(margins, ids=None):
    rows = len(margins)
    ids = torch.arange(16).expand(rows, -1) if ids is None else ids
    values = torch.arange(20.0, 20.0 - ids.shape[1], -1.0).double().expand(rows, -1)
    return Reference(ids=ids, values=values, tops=values[:, 0], margins=torch.tensor(margins).double())


def a_choice(*best, tied=()):
    ids = torch.stack([torch.tensor([first, *(t for t in range(16) if t != first)])[:16] for first in best])
    values = torch.arange(20.0, 4.0, -1.0).expand(len(best), -1)
    return Choice(ids=ids, values=values, tied=torch.tensor([row in tied for row in range(len(best))]))


# Statistics.


@pytest.mark.parametrize(
    ("top", "spacing"), [(20.0, 0.125), (16.0, 0.125), (15.9, 0.0625), (1.0, 2**-7), (-3.0, 2**-6)]
)
def test_an_ulp_is_the_spacing_of_bfloat16_at_the_top(top, spacing):
    assert in_ulps(torch.tensor([0.5]), torch.tensor([top])).item() == 0.5 / spacing


def test_near_tie_rates_count_margins_up_to_tau_and_at_it():
    assert near_tie_rates(torch.tensor([0.0, 0.5, 1.0, 2.0]), (0.25, 0.5, 4)) == {"0.25": 0.25, "0.5": 0.5, "4": 1.0}


def test_a_flip_curve_counts_rows_and_flips_by_margin_the_last_bin_being_open():
    margins, flipped = torch.tensor([0.0, 0.9, 1.0, 50.0]), torch.tensor([True, False, True, False])
    assert flip_curve(margins, flipped, (0.0, 1.0, 3.0)) == (
        Bin(low=0.0, high=1.0, rows=2, flips=1),
        Bin(low=1.0, high=3.0, rows=1, flips=1),
        Bin(low=3.0, high=None, rows=1, flips=0),
    )


def test_phi_and_the_chance_of_a_flip():
    assert phi(1.0) == pytest.approx((1 + erf(1 / sqrt(2))) / 2, abs=1e-15)
    assert flip_chance(0.0, 0.3) == 0.5
    assert flip_chance(sqrt(2) * 0.3, 0.3) == pytest.approx(phi(-1.0))
    assert flip_chance(1.0, 0.0) == 0.0


@pytest.mark.parametrize("sigma", [0.05, 1.0])
def test_the_sigma_that_drew_the_flips_is_found(sigma):
    draw = torch.Generator().manual_seed(0)
    margins = torch.rand(4000, generator=draw).double() * 4 * sigma
    errors = torch.normal(0.0, sigma * sqrt(2), (4000,), generator=draw)
    assert fit_sigma(margins, errors > margins) == pytest.approx(sigma, rel=0.1)
    assert fit_sigma(margins, margins < 0) == 0.0


@pytest.mark.parametrize(
    ("first", "second", "p"), [(0, 5, 0.0625), (5, 0, 0.0625), (0, 6, 0.03125), (0, 0, 1), (3, 3, 1), (1, 4, 0.375)]
)
def test_mcnemar_is_exact(first, second, p):
    assert mcnemar(first, second) == p


def test_chains_fork_and_nothing_seen_is_not_nothing():
    assert fork_chance(0.5, 3) == 0.875
    assert fork_chance(0.0, 1000) == 0.0
    assert most_likely_below(300) == pytest.approx(0.00994, abs=1e-5)


# Figures.


def test_the_figures_of_a_choice_made_by_hand():
    truth, plain = a_reference([0.1, 0.2, 0.3, 4.0]), a_choice(0, 0, 0, 0)
    found = neartie.describe(a_choice(0, 1, 99, 0, tied=(3,)), truth, plain, setting=Setting(tp=2), **NAMES)
    assert (found.setting, found.rows, found.flips, found.flip_rate) == ("TP=2", 4, 2, 0.5)
    assert found.largest_flipped == pytest.approx(0.3)
    assert (found.best_recalled, found.set_recalled, found.boundary_ties) == (1.0, 63 / 64, 0.25)
    assert (found.changed_best, found.changed_sets) == (2, 1)


def test_a_best_token_that_is_lost_counts_as_not_recalled():
    without = Choice(ids=torch.arange(1, 17)[None], values=torch.zeros(1, 16), tied=torch.tensor([False]))
    found = neartie.describe(without, a_reference([1.0]), a_choice(0), setting=PLAIN, **NAMES)
    assert (found.best_recalled, found.set_recalled) == (0.0, 15 / 16)


def test_pairs_count_rows_that_one_alone_gets_right():
    truth = a_reference([1.0] * 8)
    found = neartie.pair(
        ("fp8", a_choice(0, 1, 1, 1, 1, 0, 1, 2)), ("bf16", a_choice(0, 0, 0, 0, 1, 1, 1, 1)), truth, source="made"
    )
    assert (found.only_head, found.only_against, found.p, found.rows) == (1, 3, mcnemar(1, 3), 8)


def test_the_reference_is_float64_rounded_once_to_float32():
    hidden, full = torch.tensor([[1.0, 2.0**-12]]).bfloat16(), torch.tensor([[1.0, 0], [1, 1], [0, 1]]).bfloat16()
    found = neartie.refer(hidden, torch.cat([full, torch.zeros(13, 2).bfloat16()]))
    assert (found.ids[0, :3].tolist(), found.margins.item()) == ([1, 0, 2], 2.0**-12)  # bfloat16 logits would tie


def test_a_tie_at_the_boundary_is_seen():
    descending = torch.arange(TOKENS, 0, -1).float()
    tied = descending.clone()
    tied[16] = tied[15]
    heads, hidden = neartie.given_heads(torch.stack([descending, tied]), 2)
    assert neartie.choose(heads, hidden).tied.tolist() == [False, True]


def test_one_thing_is_changed_at_a_time_and_batches_are_as_large_as_rows_allow():
    assert [str(one) for one in neartie.settings([1, 2], 60)] == [
        "plain",
        "TP=2",
        "M=1",
        "M=8",
        "fp32 logits",
        "torch ties",
    ]
    assert "M=448" in map(str, neartie.settings([1], 448))


def stored(head) -> torch.Tensor:
    return head.weight if hasattr(head, "weight") else head.weight_packed


def test_heads_of_float32_logits_hold_the_same_numbers():
    for name in neartie.FORMATS:
        (narrow,), (wide,) = Heads(name, weight())(), Heads(name, weight())(logits="fp32")
        assert wide.logits_dtype is torch.float32
        assert torch.equal(stored(narrow).float(), stored(wide).float())


def test_rounding_logits_flips_near_ties_and_float32_logits_do_not():
    report = measured()
    plain, wide = (next(one for one in report.figures if one.setting == word) for word in ("plain", "fp32 logits"))
    assert plain.flips > 0
    assert (wide.flips, wide.set_recalled) == (0, 1.0)


def measured(formats=("bf16", "fp8"), rows=200):
    made = neartie.planted(states(), weight(), rows, 0)
    return neartie.measure([made], weight(), formats, [1, 2])[0]


def test_more_error_in_the_head_flips_more_and_at_wider_margins():
    plain, packed = (one for one in measured().figures if one.setting == "plain")
    assert packed.flips > plain.flips
    assert packed.sigma > plain.sigma
    assert packed.set_recalled < plain.set_recalled


# Planted margins.


def test_planted_rows_have_the_margins_that_were_drawn_up_to_rounding():
    made = neartie.planted(states(), weight(), 200, 7)
    errors = neartie.refer(made.hidden, weight()).margins - neartie.draw_margins(200, 7)
    assert errors.abs().median() < 0.03
    assert errors.abs().max() < 0.3
    exact = neartie.planted(states().float(), weight(), 200, 7)
    assert torch.allclose(
        neartie.refer(exact.hidden, weight()).margins.float(), neartie.draw_margins(200, 7), atol=1e-4
    )


def test_margins_are_the_mixture_that_is_stated_and_the_seed_is_all_that_chooses_them():
    margins = neartie.draw_margins(20_000, 3)
    assert (margins > 2).double().mean() == pytest.approx(0.7 * phi(2.0), abs=0.01)
    assert margins[margins < 0.5].mean() < 0.2
    assert torch.equal(margins, neartie.draw_margins(20_000, 3))
    assert not torch.equal(margins, neartie.draw_margins(20_000, 4))
    about = neartie.planted(states(), weight(), 2, 3).about
    assert "70% of margins normal (4, 1), the others exponential with mean 0.2, seed 3" in about


# Controls, and what they are worth.


def lower_ids(hidden, head, **how):
    """A mutant: shards forget where they begin."""
    found = compute_candidates(hidden, head, **how)
    return Candidates(ids=found.ids % (TOKENS // head.shard.world_size), values=found.values)


class Drifting:
    """A mutant: every call chooses otherwise."""

    def __init__(self):
        self.calls = 0

    def __call__(self, hidden, head, **how):
        self.calls += 1
        return compute_candidates(hidden + self.calls, head, **how)


def highest_first(logits, k):
    """A mutant of the tie rule: of equal values those with the highest columns."""
    values, columns = torch.sort(logits.flip(1), dim=1, descending=True, stable=True)
    return values[:, :k], logits.shape[1] - 1 - columns[:, :k]


def shared(logits, tp, **how):
    plain = neartie.choose_of(logits, 1, **{name: value for name, value in how.items() if name == "ties"})
    found = neartie.same_logits_shared(logits, plain, tp, **how, **NAMES)
    return found.flips, found.changed


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_same_logits_give_the_same_candidates_at_every_tp_even_where_all_tie(tp):
    assert shared(tied_logits(), tp) == (0, 0)
    assert shared(torch.ones(3, TOKENS).bfloat16(), tp) == (0, 0)


def test_a_selector_that_forgets_offsets_breaks_the_control():
    logits = torch.randn(6, TOKENS, generator=torch.Generator().manual_seed(0)).bfloat16()
    flips, changed = shared(logits, 4, select=lower_ids)
    assert flips > 0
    assert changed == 6


def test_a_tie_rule_that_depends_on_shards_breaks_the_control(monkeypatch):
    monkeypatch.setitem(neartie.RULES, "canonical", highest_first)
    flips, changed = shared(torch.ones(3, TOKENS).bfloat16(), 4)
    assert (flips, changed) == (3, 3)


def test_the_same_setting_twice_is_the_same_unless_the_selector_drifts():
    heads = Heads("bf16", weight())(1)
    once, drifting = neartie.choose(heads, states()), Drifting()
    assert neartie.same_setting_twice(once, heads, states(), **NAMES).changed == 0
    once = neartie.choose(heads, states(), select=drifting)
    assert neartie.same_setting_twice(once, heads, states(), select=drifting, **NAMES).flips > 0


def test_ranks_that_choose_differently_are_an_error_and_no_figure():
    heads = Heads("bf16", weight())(2)
    with pytest.raises(neartie.NearTieError, match=r"ranks \[1\] chose other candidates than rank 0"):
        neartie.choose(heads, states(), select=lambda *args, **how: by_rank(*args, **how))


def by_rank(hidden, head, **how):
    found = compute_candidates(hidden, head, **how)
    return Candidates(ids=found.ids + head.shard.rank, values=found.values)


# The command.


@pytest.fixture
def tpbed(capsys, tmp_path, monkeypatch):
    """Runs a command line in an empty folder, with a small head in place of SmolLM2's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(smollm2, "head_weight", lambda dtype: weight().to(dtype))
    monkeypatch.setattr(smollm2, "hidden_states", states)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main(["neartie", *map(str, arguments)])
        return end.value.code, *capsys.readouterr()

    return run


def test_json_has_the_figures_of_the_table_and_the_same_answer(tpbed):
    status, out, err = tpbed("--tp", "1,2", "--json")
    told = [json.loads(line) for line in out.splitlines()]
    _, text, _ = tpbed("--tp", "1,2")
    assert status == 0
    assert {one["type"] for one in told} == {"rows", "figures", "bin", "control", "drafts", "paired", "answer"}
    figures = [one for one in told if one["type"] == "figures"]
    lines = [line.split("│")[2:6] for line in text.splitlines() if line.startswith("│")]
    table = [tuple(cell.strip() for cell in line) for line in lines if line[-1].strip().endswith("%")]
    assert table == [(o["setting"], str(o["rows"]), str(o["flips"]), f"{o['flip_rate']:.1%}") for o in figures]
    assert text.endswith("\n".join(told[-1]["lines"]) + "\n")
    assert "planted rows, fp8 head: TP=2 ...\n" in err


def test_the_same_command_says_the_same_again_and_another_seed_another(tpbed):
    asked = ("--tp", "2", "--rows", "20", "--formats", "bf16", "--json")
    first = tpbed(*asked)[1]
    assert first == tpbed(*asked)[1]
    assert first != tpbed(*asked, "--seed", "1")[1]
    assert {one["rows"] for one in map(json.loads, first.splitlines()) if one["type"] == "rows"} == {20}


def test_the_plot_has_each_head_and_its_fit(tpbed, tmp_path):
    assert tpbed("--tp", "1", "--plot", "ties.svg")[0] == 0
    text = (tmp_path / "ties.svg").read_text()
    for word in ("bf16", "fp8, sigma", "smollm2: 60 rows", "planted: 60 rows", "log10 of the margin", "bf16 ulps"):
        assert f"<!-- {word}" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--formats", "fp7"), "give some of bf16, fp8"),
        (("--tp", "1,x"), "give whole numbers"),
        (("--tp", "0"), "1 or more"),
        (("--tp", "3"), "cannot share equally"),
        (("--plot", "a.gif"), "no known file type"),
    ],
)
def test_what_was_asked_for_wrongly_is_said_before_anything_is_measured(tpbed, monkeypatch, arguments, said):
    monkeypatch.setattr(neartie, "refer", None)
    status, out, err = tpbed(*arguments)
    assert (status, out) == (2, "")
    assert said in err.splitlines()[-1]


def answered(flip_fp8, changed=0):
    truth, rows = a_reference([0.1] * 40), 40
    plain, packed = a_choice(*[0] * rows), a_choice(*[1] * flip_fp8, *[0] * (rows - flip_fp8))
    of = {"bf16": plain, "fp8": packed}
    figures = [
        neartie.describe(choice, truth, choice, source="made", head=head, setting=setting)
        for head, choice in of.items()
        for setting in (PLAIN, Setting(logits="fp32"), Setting(tp=2))
    ]
    report = neartie.Report(
        source="made",
        about="by hand",
        rows=rows,
        tps=(1, 2),
        near_ties={},
        near_ties_ulps={},
        curves={head: flip_curve(truth.margins, neartie.flips(choice, truth), (0.0,)) for head, choice in of.items()},
        figures=tuple(figures),
        controls=(neartie.Control(source="made", head="bf16", name="c", rows=rows, flips=changed, changed=changed),),
        drafts=(),
        paired=(neartie.pair(("fp8", packed), ("bf16", plain), truth, source="made"),),
    )
    return "\n".join(neartie_cli.answer([report]))


def test_the_answer_blames_the_head_where_pairs_say_so():
    text = answered(10)
    assert "10 of 40 made rows flip (25.0%), none at a margin above 0.100" in text
    assert "alone right in 0 rows, bf16 in 10: McNemar p=0.002" in text
    assert "So: not the selector; the head format makes fp8 worse beyond chance." in text


def test_the_answer_says_chance_where_few_rows_differ():
    assert "So: not the selector; fp8 cannot be told from chance on these rows." in answered(3)
    assert "it takes 6 of 240," in answered(3)


def test_the_answer_blames_the_selector_where_a_control_fails():
    assert "So: the selector is at fault" in answered(10, changed=1)


def test_rows_of_any_origin_can_be_measured():
    report = neartie.measure([Rows(name="mine", about="", hidden=states(9))], weight(), ["bf16"], [1])[0]
    assert (report.source, report.rows, report.paired) == ("mine", 9, ())


def test_given_heads_give_the_logits_they_were_given():
    logits = torch.randn(5, TOKENS, generator=torch.Generator().manual_seed(0)).bfloat16()
    heads, hidden = neartie.given_heads(logits, 1)
    assert isinstance(heads[0], DenseHead)
    assert torch.equal(hidden @ heads[0].weight.T, logits)
