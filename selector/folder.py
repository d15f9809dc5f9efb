"""CheckpointFolder: the JSON and safetensors files of a checkpoint, and errors that say which of them is wrong."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tpbed.selector.errors import SelectionError

CheckpointPath = str | os.PathLike[str]
INDEX_FILE, TENSOR_FILE, CONFIG_FILE = "model.safetensors.index.json", "model.safetensors", "config.json"


class CheckpointError(SelectionError):
    """A checkpoint that does not hold the head that was asked for, or holds it in a format that is not known."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder with config.json and safetensors files, one or in parts. Every method raises CheckpointError alone."""

    path: Path

    @classmethod
    def at(cls, path: CheckpointPath) -> CheckpointFolder:
        """The folder of a path, which may be a str."""
        if not isinstance(path, str | os.PathLike):
            raise CheckpointError(f"path={path!r} is {type(path).__name__}: give the folder of a checkpoint.")
        return cls(Path(path))

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return (self.path / name).is_file()

    def read_json(self, name: str) -> dict[str, Any]:
        """The object that a JSON file holds."""
        file = self.path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is not there: give the folder of a checkpoint, with its {CONFIG_FILE}.")
        try:
            read = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file} is not readable as JSON ({_one_line(error)}): fetch it again.") from error
        return as_object(read, str(file))

    def files(self) -> dict[str, str]:
        """The file of every tensor: by the index of a checkpoint in parts, or the one file that there is."""
        if self.has(INDEX_FILE):
            return self._indexed()
        if not self.has(TENSOR_FILE):
            raise CheckpointError(
                f"{self.path} has neither {TENSOR_FILE} nor {INDEX_FILE}: give the folder of a safetensors checkpoint."
            )
        return dict.fromkeys(self._keys(TENSOR_FILE), TENSOR_FILE)

    def tensor(self, name: str, key: str) -> Tensor:
        """One tensor of a file, on the CPU."""
        try:
            with safe_open(self.path / name, framework="pt") as opened:
                held = opened.keys()
                if key in held:
                    tensor: Tensor = opened.get_tensor(key)
                    return tensor
        except (OSError, SafetensorError) as error:
            raise self._broken(name, error) from error
        raise CheckpointError(f"{self.path / name} has no {key}, where {INDEX_FILE} says it is: fetch both again.")

    def _keys(self, name: str) -> list[str]:
        try:
            with safe_open(self.path / name, framework="pt") as opened:
                return list(opened.keys())
        except (OSError, SafetensorError) as error:
            raise self._broken(name, error) from error

    def _indexed(self) -> dict[str, str]:
        file = self.path / INDEX_FILE
        places = as_object(self.read_json(INDEX_FILE).get("weight_map"), f"weight_map of {file}")
        for key, place in places.items():
            parts = PurePosixPath(place).parts if isinstance(place, str) else ()
            if not parts or place.startswith("/") or ".." in parts:
                raise CheckpointError(f"{file} has {key} in {place!r}: give the name of a file in that folder.")
        return places

    def _broken(self, name: str, error: Exception) -> CheckpointError:
        file = self.path / name
        if not file.exists():
            return CheckpointError(
                f"{file} is not there, but {INDEX_FILE} names it: fetch all parts of the checkpoint."
            )
        return CheckpointError(
            f"{file} ({file.stat().st_size} bytes) is no whole safetensors file ({_one_line(error)}): fetch it again."
        )


def as_object(read: object, where: str) -> dict[str, Any]:
    """What JSON calls an object; CheckpointError for anything else."""
    if not isinstance(read, dict):
        raise CheckpointError(f"{where} is {type(read).__name__}, but a JSON object is needed: fetch it again.")
    return read


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
