"""The pages: every block of Python on them runs, and does what the block of text below it says."""

import contextlib
import io
import os
import re
import runpy
from pathlib import Path

import pytest

from tpbed.harness.choice import Changes, choose_plans
from tpbed.harness.runner import run_plan
from tpbed.scenarios import CATALOGUE
from tpbed.tp.simulated import SimulatedWorld

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MILLISECONDS = re.compile(r"\d[\d.,]* ms")


def blocks(page):
    """(language, text, line of the page) of each."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [(found[1], found[2], text.count("\n", 0, found.start(2)) + 1) for found in BLOCK.finditer(text)]


def examples(page):
    """Each block of Python, and the one that follows it."""
    found = blocks(page)
    pairs = zip(found, [*found[1:], ("", "", 0)], strict=True)
    return [
        pytest.param(code, said, id=f"line{line}") for (kind, code, line), (_, said, _) in pairs if kind == "python"
    ]


def same_but_for_times(text):
    return MILLISECONDS.sub("N ms", text)


@pytest.fixture
def example(tmp_path, monkeypatch):
    """An empty folder of that name, which is the current one."""
    folder = tmp_path / "example"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(("code", "said"), examples("tp/README.md"))
def test_an_example_of_the_simulated_world_prints_what_the_page_says(example, code, said):
    (example / "program.py").write_text(code, encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(example / "program.py"))
    printed = out.getvalue().replace(f"{example.parent}{os.sep}", "")
    assert same_but_for_times(printed) == same_but_for_times(said)


def test_the_page_of_the_simulated_world_is_code_and_what_it_prints_in_turn():
    languages = [language for language, _, _ in blocks("tp/README.md")]
    assert languages == ["python", "text"] * (len(languages) // 2)


SELECTORS = [code for kind, code, _ in blocks("README.md") if kind == "python" and "def candidates" in code]
TESTS = [example for example in examples("README.md") if example.values[0] not in SELECTORS]


def test_the_selector_of_the_readme_is_right_but_for_the_order_of_equal_values(example, monkeypatch):
    (code,) = SELECTORS
    (example / "selector_of_the_readme.py").write_text(code, encoding="utf-8")
    status = {}
    for name in ("healthy/tp4-padded-tail", "ties/canonical-tp4"):
        changes = Changes(selector="selector_of_the_readme:candidates")
        (plan,) = choose_plans([name], CATALOGUE, seed=0, changes=changes)
        with SimulatedWorld(plan.scenario.world_size) as world:
            verdict = run_plan(world, plan)
        status[name] = verdict.status, {finding.kind for finding in verdict.findings}
    assert status == {"healthy/tp4-padded-tail": ("PASS", set()), "ties/canonical-tp4": ("FAIL", {"order"})}


@pytest.mark.parametrize(("code", "said"), TESTS)
def test_the_example_of_the_readme_fails_with_the_explanation_that_it_shows(pytester, monkeypatch, code, said):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeini("[pytest]\n")
    name = re.search(r"tests/(test_\w+\.py)", said)[1]
    pytester.mkdir("tests").joinpath(name).write_text(code, encoding="utf-8")
    outcome = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist")
    outcome.assert_outcomes(failed=1)
    shown = [line.removeprefix("E ").strip() for line in outcome.outlines]
    assert same_but_for_times("\n".join(line.strip() for line in said.splitlines())) in same_but_for_times(
        "\n".join(shown)
    )
