"""FIELD: public reports by number, and the scenarios that show them; OUTSIDE: those that no scenario can, and why."""

from tpbed.scenarios import CATALOGUE

FIELD: dict[str, tuple[str, ...]] = {
    report: tuple(scenario.name for scenario in CATALOGUE.values() if report in scenario.reports)
    for report in sorted({report for scenario in CATALOGUE.values() for report in scenario.reports})
}

_ONE_GPU = (
    "Two ranks on one GPU: a world on NCCL compares the UUIDs that its ranks see before it forms a group "
    "(tpbed.tp.gpus), so no rank program gets that far."
)
_SURVIVORS = (
    "Processes and memory that survive a run: the world and its janitor end them from outside, after any rank program; "
    "tests/ray/test_janitor.py kills a driver and looks for what is left."
)
OUTSIDE: dict[str, str] = {
    "dphnAI/sonar#157": _ONE_GPU,
    "verl-project/verl#161": _ONE_GPU,
    "verl-project/verl#1752": _ONE_GPU,
    "ray-project/ray#26118": _SURVIVORS,
    "ray-project/ray#31451": _SURVIVORS,
}
