"""A driver that started Ray itself and is killed: its ranks, Ray's own processes and Ray's folder are gone at once."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tpbed.tp.janitor import find_users

pytestmark = pytest.mark.xdist_group("ray")
DRIVER = """
import os, sys
for name in ("RAY_ADDRESS", "PYTEST_XDIST_TESTRUNUID"):
    os.environ.pop(name, None)
from tpbed.tp.ray_world import RayWorld
with RayWorld(2) as world:
    print("ready", flush=True)
    if sys.argv[1] == "stay":
        sys.stdin.read()
"""


def start(how: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", DRIVER, how], stdin=pipe, stdout=pipe, text=True)


def test_a_killed_driver_leaves_neither_ray_nor_its_folder():
    with start("stay") as driver:
        assert driver.stdout.readline() == "ready\n"
        children = psutil.Process(driver.pid).children(recursive=True)
        janitor = next(child for child in children if "tpbed.tp.janitor" in child.cmdline())
        folder = janitor.cmdline()[-1]
        assert Path(folder).is_dir()
        assert len(find_users(folder)) > 2
        driver.kill()
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert find_users(folder) == []
    assert not Path(folder).exists()


def test_a_driver_that_ends_well_leaves_nothing_either():
    before = set(Path("/tmp").glob("tpbed-ray-*"))
    with start("go") as driver:
        assert driver.stdout.readline() == "ready\n"
        driver.stdin.close()
    assert driver.returncode == 0
    assert [folder for folder in set(Path("/tmp").glob("tpbed-ray-*")) - before if not find_users(str(folder))] == []
