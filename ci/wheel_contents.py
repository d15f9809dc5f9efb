"""Compares a wheel with the checkout it was built from, and imports every module of it as installed.

Run by ci/wheel.sh as `python -I wheel_contents.py WHEEL CHECKOUT`, with the Python that the wheel is installed in.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

WITHOUT = {"tpbed/selector/triton_kernels": "triton"}  # modules that need what only a torch for CUDA brings
FOLDERS = ("harness", "selector", "tp", "scenarios")


def packed_files(wheel: Path) -> set[str]:
    """Names of the files in the wheel, such as `tpbed/tp/ledger.py`, without its metadata."""
    return {name for name in ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}


def checkout_files(checkout: Path) -> set[str]:
    """The names that the wheel should have: every file of the four folders, package data too, but no cache."""
    files = (
        path.relative_to(checkout) for folder in FOLDERS for path in (checkout / folder).rglob("*") if path.is_file()
    )
    return {
        f"tpbed/{path.as_posix()}"
        for path in files
        if not any(part.startswith((".", "__pycache__")) for part in path.parts)
    }


def main(wheel: Path, checkout: Path) -> None:
    packed, wanted = packed_files(wheel), checkout_files(checkout)
    if packed != wanted:
        raise SystemExit(
            f"{wheel.name} lacks {sorted(wanted - packed)} and has {sorted(packed - wanted)} beyond the checkout: "
            "see packages and package-data in pyproject.toml."
        )
    modules = sorted(name.removesuffix(".py").removesuffix("/__init__") for name in packed if name.endswith(".py"))
    absent = [name for name, needed in WITHOUT.items() if find_spec(needed) is None]
    for module in (import_module(name.replace("/", ".")) for name in modules if name not in absent):
        if not Path(str(module.__file__)).is_relative_to(sys.prefix):
            raise SystemExit(f"{module.__name__} came from {module.__file__}, not from the installed wheel.")
    imported = len(modules) - len(absent)
    print(f"{wheel.name}: {len(packed)} files as in the checkout, {imported} modules imported, not {absent}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
