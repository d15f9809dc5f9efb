"""Flight Recorder dumps built by hand, field by field as PyTorch's FlightRecorderDetail.hpp writes them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SITE = {"name": "step", "filename": "/app/model/decode.py", "line": 7}
INSIDE_TORCH = {
    "name": "all_reduce",
    "filename": "/v/site-packages/torch/distributed/distributed_c10d.py",
    "line": 3245,
}


class Recorder:
    """What one rank's recorder holds, told in order; every method returns the recorder."""

    def __init__(self, rank: int, world_size: int = 4, *, backend: str = "nccl", first_record: int = 0) -> None:
        self.rank, self.backend, self.first_record = rank, backend, first_record
        self.groups: dict[str, tuple[str, Sequence[int]]] = {"0": ("default_pg", range(world_size))}
        self.entries: list[dict[str, Any]] = []
        self.seqs: dict[str, int] = {}

    def group(self, name: str, ranks: Sequence[int], desc: str = "undefined") -> Recorder:
        self.groups[name] = (desc, ranks)
        return self

    def calls(
        self,
        op: str = "all_reduce",
        *,
        group: str = "0",
        sizes: Sequence[Sequence[int]] = ((4, 16),),
        outputs: Sequence[Sequence[int]] | None = None,
        dtype: str = "Float",
        state: str = "completed",
        same_seq: bool = False,
        line: int = 7,
        **fields: Any,
    ) -> Recorder:
        seq = self.seqs[group] = self.seqs.get(group, 0) + (not same_seq)
        return self._enter(op, group, seq, 0, sizes, sizes if outputs is None else outputs, dtype, state, line, fields)

    def waits(self, op: str = "all_reduce", **fields: Any) -> Recorder:
        return self.calls(op, **{"state": "scheduled", **fields})

    def message(
        self, op: str, peer: int, *, state: str = "completed", same_seq: bool = False, **fields: Any
    ) -> Recorder:
        """op: send or recv, or coalesced, which ends a batch."""
        seq = self.seqs["p2p"] = self.seqs.get("p2p", 0) + (not same_seq)
        arrow = {"send": f" {self.rank}->{peer}", "recv": f" {self.rank}<-{peer}"}.get(op, "")
        sizes = () if op == "coalesced" else ((4,),)
        return self._enter(op + arrow, "0", 0, seq, sizes, sizes, "Float", state, 9, {"is_p2p": True, **fields})

    def starts_at(self, group: str, seq: int) -> Recorder:
        """The ring has lost what came before."""
        self.seqs[group] = seq - 1
        return self

    def _enter(
        self,
        name: str,
        group: str,
        seq: int,
        p2p_seq: int,
        sizes: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        dtype: str,
        state: str,
        line: int,
        fields: dict[str, Any],
    ) -> Recorder:
        number = self.first_record + len(self.entries)
        entry = {
            "record_id": number,
            "pg_id": int(group) if group.isdecimal() else 1,
            "process_group": (group, self.groups[group][0]),
            "collective_seq_id": seq,
            "p2p_seq_id": p2p_seq,
            "op_id": number + 1,
            "profiling_name": f"{self.backend}:{name}",
            "time_created_ns": 1_700_000_000_000_000_000 + number,
            "input_sizes": [list(size) for size in sizes],
            "input_dtypes": [dtype] * len(sizes),
            "output_sizes": [list(size) for size in outputs],
            "output_dtypes": [dtype] * len(outputs),
            "state": state,
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": 1_700_000_000_100_000_000 + number if state == "completed" else None,
            "retired": state == "completed",
            "timeout_ms": 600_000,
            "is_p2p": False,
            "frames": [INSIDE_TORCH, {**SITE, "line": line}],
        }
        self.entries.append(entry | fields)
        return self

    def dump(self) -> dict[str, Any]:
        return {
            "version": "2.10",
            "comm_lib_version": "2.27.5",
            "pg_config": {
                name: {"name": name, "desc": desc, "ranks": json.dumps(list(ranks))}
                for name, (desc, ranks) in self.groups.items()
                if self.rank in ranks
            },
            "pg_status": {},
            "entries": self.entries,
        }


def save(folder: Path, *recorders: Recorder) -> Path:
    """As the recorder does with TORCH_NCCL_DEBUG_INFO_TEMP_FILE=FOLDER/nccl_trace_rank_."""
    for recorder in recorders:
        (folder / f"nccl_trace_rank_{recorder.rank}").write_bytes(pickle.dumps(recorder.dump(), protocol=2))
    return folder


def save_json(folder: Path, *recorders: Recorder) -> Path:
    """As `_dump_nccl_trace_json` writes: no frames, and 0 where a time is not known."""
    for recorder in recorders:
        dump = recorder.dump()
        for entry in dump["entries"]:
            del entry["frames"]
            for name in ("time_discovered_started_ns", "time_discovered_completed_ns"):
                entry[name] = entry[name] or 0
        (folder / f"rank_{recorder.rank}.json").write_text(json.dumps(dump))
    return folder
