"""Crew: the driver's lines to the supervisors of a world's ranks, and the Ray actors behind them."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any

import ray
from ray.exceptions import ActorDiedError

from tpbed.tp import ray_cluster
from tpbed.tp.fork_server import START_S
from tpbed.tp.gpus import RankGpu, tell_shared
from tpbed.tp.job import Backend, Station
from tpbed.tp.ray_actor import Place, RankActor, send_at_once
from tpbed.tp.ray_cluster import InitError
from tpbed.tp.seats import Placement, Seats

_ANSWER_S = 30.0  # for a supervisor, which always answers; one that does not has lost its processor or its node
_PLACE_S = 120.0  # for Ray to start a supervisor: before it gives up on a node that is lost, it may wait for a minute
_CLOSE_S = 5.0
_GREET_S = 5.0

Message = tuple[Any, ...]  # a word, and what belongs to it
Hearer = Callable[[int, Message], None]


@dataclass(slots=True)
class _Seat:
    """A rank's supervisor, seen from the driver."""

    bundle: int  # of the placement group
    actor: Any
    line: Connection
    place: Place
    station: Station | None = None
    pid: int = 0  # of the rank process
    gpu: str = ""  # its UUID
    gone: bool = False


class Crew:
    """Starts the supervisors and talks to them; every question is answered at once, or its supervisor is gone."""

    def __init__(self, world_size: int, backend: Backend, placement: Placement) -> None:
        """Start an actor per rank on the nodes that Ray chooses, and a rank process in each.

        Raises InitError.
        """
        self.is_local = ray_cluster.is_local()
        self.address = "127.0.0.1" if self.is_local else ray_cluster.own_address()
        self._backend, self._key = backend, secrets.token_bytes(32)
        self._listener = socket.create_server((self.address, 0), backlog=world_size)
        self._places: Seats | None = None
        self._tickets = itertools.count()
        self._actors: list[Any] = []
        self._seats: list[_Seat] = []
        try:
            self._places = Seats(world_size, backend, placement)
            self._seats = sorted(self._enlist(range(world_size)), key=_by_node_and_gpu)
            self._settle(dict(enumerate(self._stations())))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The rank processes, by rank."""
        return tuple(seat.pid for seat in self._seats)

    @property
    def gone(self) -> frozenset[int]:
        """The ranks whose supervisor is gone, and its rank with it."""
        return frozenset(rank for rank, seat in enumerate(self._seats) if seat.gone)

    def tell(self, rank: int, *message: Any) -> None:
        """Send a message; whether it arrived is heard later."""
        with suppress(OSError):
            self._seats[rank].line.send(message)

    def tell_all(self, *message: Any) -> None:
        """Send a message to every supervisor."""
        for rank in range(len(self._seats)):
            self.tell(rank, *message)

    def hear(self, ranks: Iterable[int], wait_s: float) -> list[tuple[int, Message]]:
        """What the supervisors of these ranks have said, waiting for the first; ("gone",) from one that has died."""
        lines: dict[Any, int] = {self._seats[rank].line: rank for rank in ranks if not self._seats[rank].gone}
        ready = wait(list(lines), max(0.0, wait_s)) if lines else ()
        return [(lines[line], self._receive(lines[line])) for line in ready]

    def ask(
        self, ranks: Iterable[int], *message: Any, other: Hearer | None = None, wait_s: float = _ANSWER_S
    ) -> dict[int, Message]:
        """Ask supervisors. Returns their answers, none from those that are gone; `other` hears what else they say."""
        answers: dict[int, Message] = {}
        missing, deadline = set(ranks) - self.gone, time.monotonic() + wait_s
        for rank in missing:
            self.tell(rank, *message)
        while missing:
            for rank, said in self.hear(missing, deadline - time.monotonic()) or self._give_up(missing):
                if said[0] == message[0]:
                    answers[rank] = said[1:]
                elif other is not None:
                    other(rank, said)
                if said[0] in (message[0], "gone"):
                    missing.discard(rank)
        return answers

    def set_pid(self, rank: int, pid: int) -> None:
        """The rank has a new process."""
        self._seats[rank].pid = pid

    def replace(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """New actors and processes for ranks whose actors are gone, and new processes where that changes a station.

        Returns all ranks that have a new process: a rank that comes to another node is one more there.
        Raises InitError.
        """
        for rank in ranks:
            self._seats[rank].line.close()
        for rank, seat in zip(ranks, self._enlist([self._seats[r].bundle for r in ranks]), strict=True):
            self._seats[rank] = seat
        stations = dict(enumerate(self._stations()))
        self._settle({rank: stations[rank] for rank in ranks})
        moved = [rank for rank, seat in enumerate(self._seats) if seat.station != stations[rank]]
        for rank in moved:
            self._move(rank, stations[rank])
        return (*ranks, *moved)

    def _move(self, rank: int, station: Station) -> None:
        self._seats[rank].station = station
        for _, pid in self.ask([rank], "move", station, wait_s=2 * START_S).values():
            self.set_pid(rank, pid)

    def close(self) -> None:
        """End ranks and actors, within bounds, and hang up; whoever is left then ends by itself."""
        self.ask(range(len(self._seats)), "close", wait_s=_CLOSE_S)
        for actor in self._actors:
            with suppress(Exception):  # Ray may be shut down already
                ray.kill(actor)
        self._actors.clear()
        if self._places is not None:
            self._places.close()
        deadline = time.monotonic() + _CLOSE_S
        while time.monotonic() < deadline and self.hear(range(len(self._seats)), deadline - time.monotonic()):
            pass  # their lines close when they are gone
        self.hang_up()

    def hang_up(self) -> None:
        """Close all lines: the supervisors kill their ranks, and end."""
        self._listener.close()
        for seat in self._seats:
            seat.gone = True
            seat.line.close()

    def _receive(self, rank: int) -> Message:
        try:
            message: Message = self._seats[rank].line.recv()
        except (EOFError, OSError):
            self._seats[rank].gone = True
            return ("gone",)
        return message

    def _give_up(self, ranks: Iterable[int]) -> list[tuple[int, Message]]:
        for rank in ranks:
            self._seats[rank].gone = True
        return [(rank, ("gone",)) for rank in ranks]

    def _enlist(self, bundles: Sequence[int]) -> list[_Seat]:
        """Actors in these bundles; once more if one dies at once, as Ray may not know yet that a node is lost."""
        try:
            return self._try_to_enlist(bundles)
        except InitError as error:
            if not isinstance(error.__cause__, ActorDiedError):
                raise
        return self._try_to_enlist(bundles)

    def _try_to_enlist(self, bundles: Sequence[int]) -> list[_Seat]:
        tickets = [next(self._tickets) for _ in bundles]
        actors = [self._hire(bundle, ticket) for bundle, ticket in zip(bundles, tickets, strict=True)]
        self._actors += actors
        places = [actor.place.remote() for actor in actors]
        lines = self._accept(tickets, places)
        found: list[Place] = ray.get(places, timeout=START_S)
        seats = zip(bundles, actors, lines, found, strict=True)
        return [_Seat(bundle, actor, line, place) for bundle, actor, line, place in seats]

    def _hire(self, bundle: int, ticket: int) -> Any:
        assert self._places is not None
        options = {"max_restarts": 0, "max_concurrency": 2, **self._places.options(bundle)}
        return ray.remote(RankActor).options(**options).remote(ticket, self._listener.getsockname()[:2], self._key)

    def _accept(self, tickets: Sequence[int], places: list[Any]) -> list[Connection]:
        """The lines of the actors that have these tickets, as they call; others are late, and no longer wanted."""
        lines: dict[int, Connection] = {}
        deadline = time.monotonic() + _PLACE_S
        while not lines.keys() >= set(tickets):
            _raise_errors(places)
            if time.monotonic() > deadline:
                raise InitError(_none_came(len(set(tickets) - lines.keys()), len(tickets)))
            if wait([self._listener], 0.2):
                line = self._greet()
                lines[line.recv()] = line
        return [lines[ticket] for ticket in tickets]

    def _greet(self) -> Connection:
        accepted, _ = self._listener.accept()
        line = Connection(accepted.detach())
        send_at_once(line)
        deliver_challenge(line, self._key)
        answer_challenge(line, self._key)
        return line

    def _stations(self) -> list[Station]:
        nodes = [seat.place.node for seat in self._seats]
        return [self._station(rank, nodes) for rank in range(len(nodes))]

    def _station(self, rank: int, nodes: list[str]) -> Station:
        here = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        return Station(
            rank=rank,
            world_size=len(nodes),
            local_rank=here.index(rank),
            local_world_size=len(here),
            backend=self._backend,
            visible_gpus=",".join(gpu for other in here for gpu in self._seats[other].place.gpus),
            single_node=len(here) == len(nodes),
            import_path=tuple(folder or os.getcwd() for folder in sys.path),
            folder=os.getcwd(),
        )

    def _settle(self, stations: dict[int, Station]) -> None:
        """Put supervisors at their stations and wait until their ranks are there."""
        for rank, station in stations.items():
            self._seats[rank].station = station
        begun = [self._seats[r].actor.start.remote(station, ray_cluster.SERVER) for r, station in stations.items()]
        ray.get(begun, timeout=2 * START_S)
        missing, deadline = set(stations), time.monotonic() + 2 * START_S
        while missing:
            for rank, (word, *rest) in self.hear(missing, deadline - time.monotonic()) or self._give_up(set(missing)):
                if word != "ready":
                    raise InitError(f"rank {rank} did not start{': ' if rest else '.'}{''.join(map(str, rest))}")
                self.set_pid(rank, rest[0])
                self._seats[rank].gpu = rest[1]
                missing.discard(rank)
        if told := tell_shared([RankGpu(rank=r, node=s.place.node, uuid=s.gpu) for r, s in enumerate(self._seats)]):
            raise InitError(told)


def _by_node_and_gpu(seat: _Seat) -> tuple[str, str, list[int]]:
    return seat.place.address, seat.place.node, [int(gpu) for gpu in seat.place.gpus if gpu.isdigit()]


def _raise_errors(places: list[Any]) -> None:
    done, _ = ray.wait(places, num_returns=len(places), timeout=0)
    try:
        ray.get(done)
    except Exception as error:
        raise InitError(f"Ray could not start the supervisor of a rank: {error}") from error


def _none_came(missing: int, world_size: int) -> str:
    return (
        f"{missing} of {world_size} supervisors did not start within {_PLACE_S:.0f} s: "
        "has the Ray cluster room for them (`ray status`), and can its nodes reach this one?"
    )
