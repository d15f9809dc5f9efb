"""TorchSeam: what of torch.distributed is replaced while a simulated world runs, so that it speaks for ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed import c10d_logger
from torch.distributed import distributed_c10d as c10d
from torch.distributed.nn import functional as _  # noqa: F401 - else its defaults are groups of the rank that imports it

from tpbed.tp.functional_seam import Pending, functional_replacements
from tpbed.tp.ledger import WORLD
from tpbed.tp.mesh_seam import Meshes
from tpbed.tp.monitored_barrier import REPLACED, monitored_barrier
from tpbed.tp.recording import BACKEND, Entry, RecordingGroup
from tpbed.tp.refusal import RefusedStore, cannot_wait, refusing
from tpbed.tp.registers import RankGroups
from tpbed.tp.simulated_group import Channel, SimulatedGroup
from tpbed.tp.simulated_rank import SimulatedRank
from tpbed.tp.simulated_run import SimulatedRun


class SimulatedProcessGroup(RecordingGroup):
    """A process group as one rank sees it. What is not simulated is refused by name, when it is called."""

    seam: TorchSeam
    description = ""
    _registered: Any = None

    @property
    def group_name(self) -> Any:
        """Its name in torch's C++ registry, where all ranks' groups lie: unlike the label, it is unique."""
        if self._registered is None:
            self._registered = f"{self.label}@{self.rank()}.{len(self.seam.registered)}"
            self.seam.registered.append(self._registered)
            _register_process_group(self._registered, self)
        return self._registered

    def _start_coalescing(self, device: Any) -> None:
        """Of a coalescing manager that is given a device: as gloo."""
        raise RuntimeError("Backend gloo does not implement startCoalescing")

    def _handle(self, work: Any, seq: int, waited: bool) -> dist.Work:
        work.entry = Entry(self._context.recorder, self.label, seq, waited)
        if not waited and cannot_wait():  # it was issued inside an operator
            self.seam.pending.add(work.outputs or work.inputs, work)
        return work  # type: ignore[no-any-return]

    @property
    def group_desc(self) -> str:
        """As given to new_group."""
        return self.description


_REFUSED_OPS = """
    _end_coalescing gather_single gather_into_tensor split_group merge_remote_group
"""
for _name in _REFUSED_OPS.split():
    setattr(SimulatedProcessGroup, _name, refusing(_name))
_IN_CPP = ("_verify_params_across_processes", "_broadcast_coalesced", "Reducer")
_REFUSED_CALLS = ("split_group", "shrink_group")  # of torch.distributed


class TorchSeam:
    """Torch's own machinery as the ranks of one run find it: groups, store, names in the C++ registry."""

    def __init__(self, run: SimulatedRun) -> None:
        self.run, self.store = run, RefusedStore()
        self.registered: list[Any] = []  # names in torch's C++ registry
        self.pending, self._meshes = Pending(), Meshes(run)
        self._channels: dict[Any, Channel] = {}

    def enlist(self) -> None:
        """Give each rank its default group."""
        members = self.run.members
        places, channel = {rank: rank for rank in members}, Channel(len(members))
        for rank in self.run.ranks:
            group = self._end(rank, channel, rank.index, WORLD, members)
            rank.groups.default_pg, rank.groups.group_count = group, 1
            _enter_in_book(rank.groups, group, "0", places, BACKEND, self.store)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let torch.distributed speak for ranks meanwhile."""
        replacements = self._replacements()
        replaced = [(owner, name, getattr(owner, name)) for owner, name, _new in replacements]
        try:
            for owner, name, new in replacements:
                setattr(owner, name, new)
            yield
        finally:
            for owner, name, old in replaced:
                setattr(owner, name, old)

    def dissolve(self) -> None:
        """Forget the groups, so that nothing of them waits for the garbage collector."""
        self.pending.dissolve()
        self._meshes.dissolve()
        for name in self.registered:
            _unregister_process_group(name)
        self._channels.clear()

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        """Groups are simulated, whatever backend they ask for; no rank clears others; a log does not mask an error."""
        return [
            (c10d, "_new_process_group_helper", self._new_group),
            (c10d, "rendezvous", self._meet),
            (c10d, "_unregister_all_process_groups", lambda: None),
            *((module, "monitored_barrier", monitored_barrier) for module in REPLACED),
            *(
                (module, name, refusing(name))
                for name in _REFUSED_CALLS
                for module in REPLACED
                if hasattr(module, name)
            ),
            *((dist, name, refusing(f"DistributedDataParallel (dist.{name}, which waits in C++)")) for name in _IN_CPP),
            *functional_replacements(self.pending),
            *self._meshes.replacements(),
            (c10d_logger, "_get_msg_dict", lambda name, *args, **kwargs: {"func_name": name}),
        ]

    def _new_group(
        self, size: int, place: int | None, ranks: list[int], backend: str, store: Any, name: str, **options: Any
    ) -> tuple[Any, Any]:
        """In the place of the function of torch.distributed that makes every group, with its arguments and answer."""
        rank, tag = self.run.here(waits=False), options.get("pg_tag")
        if name in rank.groups.pg_names.values():
            raise ValueError("The specified group name has already been created, please use a different group name")
        existing = c10d._find_pg_by_ranks_and_tag(tag, ranks) if tag else None
        if existing is not None:
            return existing, self.store
        members = tuple(ranks) or self.run.members
        if rank.index not in members:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        group = self._form(rank, name, members, name if ranks else WORLD)
        group.description = options.get("group_desc") or "undefined"
        places = {member: number for number, member in enumerate(members)}
        _enter_in_book(rank.groups, group, name, places, str(backend), self.store, tag)
        return group, self.store

    def _form(self, rank: SimulatedRank, name: str, members: tuple[int, ...], label: str) -> SimulatedProcessGroup:
        """The rank's end of a group. The members' ends meet if each has formed this group as often as the others."""
        count = rank.formed[name, members] = rank.formed.get((name, members), 0) + 1
        channel = self._channels.get((name, members, count))
        if channel is None:
            channel = self._channels[name, members, count] = Channel(len(members))
        return self._end(rank, channel, members.index(rank.index), label, members)

    def _end(
        self, rank: SimulatedRank, channel: Channel, place: int, label: str, members: tuple[int, ...]
    ) -> SimulatedProcessGroup:
        inner = SimulatedGroup(self.run, rank, channel, place)
        group = SimulatedProcessGroup(inner, rank.context, label=label, ranks=members, place=place)
        group.seam = self
        return group

    def _meet(self, *args: Any, **options: Any) -> Iterator[tuple[Any, int, int]]:
        yield self.store, self.run.here(waits=False).index, len(self.run.members)


def _enter_in_book(
    book: RankGroups, group: Any, name: str, places: dict[int, int], backend: str, store: Any, tag: str | None = None
) -> None:
    """As torch.distributed does with a group that it has made."""
    book.pg_map[group] = (backend, store)
    book.pg_names[group] = name
    book.pg_group_ranks[group] = places
    book.pg_backend_config[group] = f"cpu:{backend},cuda:{backend}"
    if not tag:
        book.tags_to_pg.setdefault("", []).append(group)
    key = book.pg_to_tag[group] = f"user:{tag}" if tag else f"ptd:{name}"
    book.tags_to_pg.setdefault(key, []).append(group)
