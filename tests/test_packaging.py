import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
FOLDERS = ("harness", "selector", "tp", "scenarios")
OWN_PATH = re.compile(r"(?<![\w./-])/(?:home|root|work|Users)/[\w.-]+")


def project_files():
    """Files that git tracks or would track: what a clone of this checkout will hold."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: nothing says which files belong to the project")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def plain_imports(source):
    """Lines of Python source that import one of the four folders by its plain name, or relatively."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                wrong = any(name.name.split(".")[0] in FOLDERS for name in names)
            case ast.ImportFrom(module=module, level=level):
                wrong = level > 0 or (module or "").split(".")[0] in FOLDERS
            case _:
                continue
        if wrong:
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_the_packages_are_the_four_folders():
    assert sorted(SETUPTOOLS["packages"]) == sorted(f"tpbed.{folder}" for folder in FOLDERS)
    assert SETUPTOOLS["package-dir"] == {f"tpbed.{folder}": folder for folder in FOLDERS}


def test_every_folder_of_the_root_with_an_init_is_a_package():
    assert sorted(init.parent.name for init in ROOT.glob("[!.]*/__init__.py")) == sorted(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_package_is_typed_and_flat(folder):  # a sub-folder imports here, and is missing from the wheel
    assert (ROOT / folder / "__init__.py").is_file()
    assert (ROOT / folder / "py.typed").is_file()
    assert [str(path) for path in (ROOT / folder).glob("*/**/*.py")] == []


def test_the_root_is_no_package():
    assert not (ROOT / "__init__.py").exists()
    assert not (ROOT / "py.typed").exists()


PLAIN = (
    "import harness",
    "import tp.ledger as ledger",
    "from selector import shard",
    "from . import x",
    "from .x import y",
)


@pytest.mark.parametrize("source", PLAIN)
def test_a_plain_import_is_seen(source):
    assert list(plain_imports(f"def late():\n    {source}\n")) == [f"2: {source}"]


def test_a_full_import_is_not_taken_for_a_plain_one():
    assert (
        list(plain_imports("import tpbed.tp\nfrom tpbed.harness import plan\nimport tpx\nfrom torch import tp")) == []
    )


def test_nothing_is_imported_by_its_plain_name():  # every class would exist twice
    sources = {path: path.read_text(encoding="utf-8") for path in project_files() if path.suffix == ".py"}
    wrong = {str(path): found for path, source in sources.items() if (found := list(plain_imports(source)))}
    assert wrong == {}


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    wrong = {}
    for path in project_files():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        if found := OWN_PATH.findall(text) + ([str(ROOT)] if f"{ROOT}/" in text else []):
            wrong[str(path)] = found
    assert wrong == {}
