"""Reproductions: a file of plain torch has the inputs of its case, and shows under torchrun what tpbed has found."""

import ast
import builtins
import os
import subprocess
import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch

from tpbed.harness import cli
from tpbed.harness.bundle import Bundle, BundleError
from tpbed.harness.case import Case, save_case
from tpbed.harness.choice import Changes, choose_plans
from tpbed.harness.fault_text import read_fault
from tpbed.harness.faults import Raise, StaleMethod, WrongScale, describe
from tpbed.harness.inputs import build_head, full_weight, hidden_states, true_logits
from tpbed.harness.plan import make_plan
from tpbed.harness.repro import ReproError, write_repro
from tpbed.harness.scenario import Overwrite, Scenario
from tpbed.harness.selectors import find_selector
from tpbed.harness.turn import Serving
from tpbed.scenarios import CATALOGUE

PLAIN = Scenario(name="repro/plain", claim="It passes.", kind=0, world_size=2, org_vocab_size=200)
REFUSED = {  # of the scenarios about one selector; of whole servers all are
    *("geometry/vocabulary-that-cannot-be-shared", "quantized/block-cut-by-a-rank"),
    *("quantized/nvfp4-scale-of-another-shard", "quantized/scale-of-another-shard"),
    *("kernel/another-back-end-on-one-rank", "kernel/another-back-end-without-nan", "kernel/another-tile-on-one-rank"),
    *("kernel/nan-made-a-number", "lifecycle/port-taken"),
}
LOADED = ("loading/", "real/", "schedule/")  # heads from elsewhere, and turns


def written(scenario, **fields):
    return write_repro(make_plan(replace(scenario, **fields), seed=7))


def loaded(text, monkeypatch, rank=0):
    """What a file defines, without running it."""
    monkeypatch.setenv("RANK", str(rank))
    module = ModuleType("loaded_repro")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where its dataclasses look for it
    exec(compile(text.removesuffix("\n\n\nmain()\n"), "repro.py", "exec"), vars(module))  # noqa: S102 - it is what we wrote
    return vars(module)


def undefined(text):
    """Names that are read and never bound in a file."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)} | set(dir(builtins))
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {one.asname or one.name.partition(".")[0] for one in node.names}
    annotations = {
        id(inner)
        for node in nodes
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if part is not None
        for inner in ast.walk(part)
    }
    read = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in annotations}
    return read - bound


def check_calls(text, names):
    """Raise TypeError for a call that its function, both in the file, would not take."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    for call in calls:
        function = names.get(getattr(call.func, "id", ""))
        unpacked = [one for one in call.args if isinstance(one, ast.Starred)]
        if isinstance(function, FunctionType) and not unpacked and all(one.arg for one in call.keywords):
            signature(function).bind(*call.args, **{one.arg: one.value for one in call.keywords})


# What is in it.


@pytest.mark.parametrize("scenario", CATALOGUE.values(), ids=lambda one: one.name)
def test_a_file_is_whole_and_needs_torch_alone_or_is_refused(scenario, monkeypatch):
    try:
        text = written(scenario)
    except ReproError as refused:
        names = [scenario.name, scenario.selector, *map(describe, scenario.faults)]
        assert any(name in str(refused) for name in names)
        is_server = isinstance(find_selector(scenario.selector), Serving)
        assert scenario.name in REFUSED or is_server or scenario.name.startswith(LOADED)
        return
    assert scenario.name not in REFUSED
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert {name.partition(".")[0] for name in modules} <= {*sys.stdlib_module_names, "torch"}
    assert undefined(text) == set()
    check_calls(text, loaded(text, monkeypatch))


@pytest.mark.parametrize("head", ["fp32", "bf16", "fp16", "fp8", "fp8-tensor", "fp8-block", "int8", "nvfp4-ct"])
@pytest.mark.parametrize("logits", ["distinct", "negative", "tied", "equal", "gaussian"])
def test_its_head_and_states_are_those_of_the_case(head, logits, monkeypatch):
    added = 0 if head == "fp8-block" else 10  # which has no room for them
    plan = make_plan(replace(PLAIN, head=head, logits=logits, added_vocab_size=added, pad_fill=3.0), seed=7)
    for rank in range(2):
        names = loaded(write_repro(plan), monkeypatch, rank)
        for step in range(3):
            states = hidden_states(plan, step)
            assert names["hidden_states"](step, 4).equal(states)
            mine = names["build_head"](None, names["full_weight"]())
            logits_of = build_head(plan, rank)
            if logits_of.quant_method is None:
                assert mine.weight.equal(logits_of.weight)
            else:
                exact = logits_of.quant_method.apply(logits_of, states.float()).float()
                assert torch.allclose((states.float() @ mine.weight.T).to(torch.bfloat16).float(), exact, rtol=2**-7)
            whole = names["full_weight"]()[:200].double()
            assert torch.allclose(states.double() @ whole.T, true_logits(plan, step)[0], rtol=2**-20, atol=2**-20)


def test_its_rows_and_shards_are_in_the_order_of_the_case(monkeypatch):
    plan = replace(make_plan(replace(PLAIN, logits="gaussian"), seed=7), row_order=(3, 0), shard_order=(1, 0))
    for rank in range(2):
        names = loaded(write_repro(plan), monkeypatch, rank)
        assert names["hidden_states"](1, PLAIN.rows).equal(hidden_states(plan, 1))
        assert names["hidden_states"](1, 2).equal(hidden_states(plan, 1, rows=2))
        assert names["build_head"](None, names["full_weight"]()).weight.equal(build_head(plan, rank).weight)


def test_the_unpacked_head_of_a_dense_case_is_the_weight(monkeypatch):
    plan = make_plan(PLAIN, seed=7)
    assert loaded(write_repro(plan), monkeypatch)["full_weight"]().equal(full_weight(plan))


def test_each_fault_is_written_where_it_strikes(monkeypatch):
    message = 'say "it\'s"\nnow'
    strikes = Raise(rank=1, seq=2, message=message)
    text = written(PLAIN, faults=(strikes, read_fault("skip@rank=0,seq=3")))
    assert f"    if RANK == 1 and seq == 2:  # {describe(strikes)}\n" in text
    assert "if RANK == 0 and seq == 3 and befallen(1, 1):" in text
    assert describe(strikes) in ast.get_docstring(ast.parse(text))
    with pytest.raises(RuntimeError) as raised:
        loaded(text, monkeypatch, rank=1)["befall"](2, None, (), {})
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("scenario", "told"),
    [
        (next(one for one in CATALOGUE.values() if one.logits == "smollm2"), "checkpoint"),
        (next(one for one in CATALOGUE.values() if one.schedule), "torchrun cannot be told"),
        (replace(PLAIN, head="fp8", faults=(WrongScale(rank=0, scale_of=1),)), "wrong_scale@rank=0,scale_of=1 cannot"),
        (replace(PLAIN, faults=(Raise(rank=0, seq=1, group="pair"),)), "strikes another group"),
        (replace(PLAIN, world_size=3), "has no head that selectors could be given: org_vocab_size=200"),
        (CATALOGUE["quantized/block-cut-by-a-rank"], "has no head that selectors could be given"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(scenario, told):
    with pytest.raises(ReproError, match=told):
        written(scenario)


def test_a_module_that_is_used_as_a_whole_is_refused(tmp_path, monkeypatch):
    (tmp_path / "my_helpers.py").write_text("def gather(x): return x\n")
    (tmp_path / "my_whole.py").write_text(
        "import my_helpers\n\ndef select(hidden, k): return my_helpers.gather(hidden)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BundleError, match="my_whole imports my_helpers as a whole"):
        Bundle().add("my_whole", "select")


def test_what_only_ranks_of_tpbed_can_ask_for_is_refused(tmp_path, monkeypatch):
    (tmp_path / "my_noted.py").write_text("from tpbed.tp.rank import decision\n\ndef f(x): decision('x', x, 'why')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BundleError, match="decision of tpbed.tp.rank means something in tpbed's worlds alone"):
        Bundle().add("my_noted", "f")


def test_a_kernel_that_never_returns_is_busy_for_ever(monkeypatch, capsys):
    names = loaded(written(CATALOGUE["kernel/masked-row-spins"]), monkeypatch)

    class Woken(Exception):
        pass

    def wake(seconds):
        raise Woken

    monkeypatch.setattr(names["time"], "sleep", wake)
    with pytest.raises(Woken):
        names["topk"](torch.full((1, 4), -torch.inf), 2)
    assert "stall in topk over (1, 4) logits" in capsys.readouterr().out


def test_two_functions_of_one_name_are_refused(tmp_path, monkeypatch):
    (tmp_path / "my_first.py").write_text("from my_second import f\n\ndef gather(x): return f(x)\n")
    (tmp_path / "my_second.py").write_text("def gather(x): return x\n\ndef f(x): return gather(x)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BundleError, match="both define gather"):
        Bundle().add("my_first", "gather")


# What it shows.


def launch(text, folder, world_size):
    """Run a file by torchrun, where tpbed cannot be imported; its exit status, and the lines that ranks print."""
    (folder / "bug.py").write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size), "bug.py"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    told = subprocess.run(
        command,
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1", "REPRO_TIMEOUT_S": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return told.returncode, sorted(line for line in told.stdout.splitlines() if line.startswith("rank "))


def test_a_hang_shows_who_raised_and_who_waited(tmp_path):
    raises = replace(PLAIN, faults=(Raise(rank=1, seq=3, message="out of memory"),))
    status, lines = launch(written(raises), tmp_path, 2)
    assert status == 1
    assert lines[0].startswith("rank 0: waited in all_gather 3 for 3 s, then RuntimeError: ")
    assert lines[1] == "rank 1: raised after all_gather 2: RuntimeError: out of memory"


def test_a_selector_of_the_user_shows_its_wrong_ids_and_the_planted_one(tmp_path, monkeypatch):
    (tmp_path / "my_copied.py").write_text(
        "import torch\n\n"
        "def local(lm_head, hidden, k):\n"
        "    logits = lm_head.quant_method.apply(lm_head, hidden)\n"
        "    return logits[:, : lm_head.shard_indices.num_org_elements].float().topk(k)\n\n"
        "def no_offset(hidden, lm_head, k, all_gather):\n"
        "    values, ids = (all_gather(part) for part in local(lm_head, hidden, k))\n"
        "    best, slots = values.topk(k)\n"
        "    return ids.gather(-1, slots), best\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    planted = replace(PLAIN, selector="my_copied:no_offset", overwrites=(Overwrite(row=0, token_id=150, value=900.0),))
    text = written(planted)
    (tmp_path / "my_copied.py").unlink()
    status, lines = launch(text, tmp_path, 2)
    wrong = f"step 0, row 0, slot 0: id {150 - 128} with logit"
    assert (status, [line.partition(wrong)[2][-35:] for line in lines if wrong in line]) == (
        1,
        ["; the whole head gives id 150 with 900.0"[-35:]] * 2,
    )


def test_a_mismatch_shows_what_each_rank_issued(tmp_path):
    status, lines = launch(written(PLAIN, faults=(read_fault("recast@rank=1,seq=1,dtype=float64"),)), tmp_path, 2)
    assert status == 1
    assert any(
        "rank 1 issued all_gather torch.float64 (4, 16)" in line and "rank 0 all_gather torch.float32" in line
        for line in lines
    )


# The command.


@pytest.fixture
def tpbed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(["repro", *(str(argument) for argument in arguments)])
        return end.value.code, *capsys.readouterr()

    return run


def test_repro_writes_a_file_that_says_what_was_found_and_how_to_run_it(tpbed):
    status, out, error = tpbed("hang/one-rank-raises", "--out", "bug.py")
    assert (status, out, error) == (0, "", "torchrun --nproc-per-node 4 bug.py\n")
    told = ast.get_docstring(ast.parse(Path("bug.py").read_text()))
    assert "torchrun --nproc-per-node 4 bug.py" in told
    assert "raise@rank=2,seq=3,message=out of memory" in told
    assert "cause rank 2 raised InjectedError after all_gather seq 2: out of memory" in told


def test_repro_takes_a_case_and_writes_what_the_case_says(tpbed):
    plan = replace(make_plan(PLAIN, seed=7), weight_seed=12345)
    save_case(Case(about="It passes.", plan=plan), Path("my.tpbed.json"))
    status, out, _ = tpbed("my.tpbed.json")
    assert status == 0 and "manual_seed(12345)" in out and "no finding" in out
    assert out.endswith("main()\n")


def test_repro_takes_faults_and_a_selector(tpbed):
    status, out, _ = tpbed(
        "--fault", "skip@rank=1,seq=2", "--tp", 2, "--selector", "tpbed.harness.engines:vllm_candidates"
    )
    assert status == 0 and "def vllm_candidates(" in out and "# skip@rank=1,seq=2" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "nothing to write"),
        (["hang/*"], "scenarios, hang/crop-tail-rank first: give one of them"),
        (["none.json"], "cannot read none.json"),
        (["hang/one-rank-raises", "--out", "gone/bug.py"], "--out gone/bug.py cannot be written"),
        (["schedule/hasty"], "no scenario matches"),
    ],
)
def test_what_repro_cannot_do_is_told_in_one_line(tpbed, arguments, told):
    status, out, error = tpbed(*arguments)
    assert (status, out, len(error.splitlines())) == (2, "", 1) and told in error


def test_stale_methods_are_written(monkeypatch):
    text = written(PLAIN, faults=(StaleMethod(rank=0),))
    assert "head.quant_method = StaleMethod()" in text and undefined(text) == set()
    assert choose_plans([], CATALOGUE, seed=0, changes=Changes(faults=(StaleMethod(rank=0),)))
