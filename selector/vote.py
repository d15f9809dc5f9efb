"""Vote: the path and the facts of a head, agreed by all ranks before anything else, with every rank's reason."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.selector.admission import AdmissionError, Path, admit
from tpbed.selector.facts import DIGEST_CHARACTERS, digest, head_facts

BALLOT_BYTES = 512  # of each rank: its path's initial, a digest of its facts, the facts, its reason; cut where longer
_DECIDES = 1 + DIGEST_CHARACTERS  # what must be the same on all ballots
_PATHS: dict[str, Path] = {"q": "quantized", "d": "dense"}
_REFUSED = "r"


def agree_admission(head: object, *, group: dist.ProcessGroup | None, device: torch.device) -> tuple[Path, str]:
    """The path that every rank's own head takes, and this rank's reason; every rank of the group calls this.

    Ranks may hold different facts - a stale quant method, an attribute that only one loader set -, and then `admit`
    alone lets one of them raise, or multiply another way, while its peers wait. Heads that differ otherwise, as
    `head_facts` lists, would answer with candidates of several heads.
    device: where the group's transport wants tensors. Cost: one all_gather of 512 bytes per rank, none in a group of 1.
    Raises AdmissionError on every rank alike, with every rank's reason and facts, unless all would take the same path
    with heads that are alike.
    """
    ballot = _fill_in(head)
    ballots = _gather(ballot, group, device)
    if {one[:_DECIDES] for one in ballots} == {ballot[:_DECIDES]} and ballot[0] != _REFUSED:
        return _PATHS[ballot[0]], ballot.partition("\n")[2]
    raise AdmissionError(
        f"the ranks cannot project their heads alike: {_told(ballots)}. Load the same parameters of one checkpoint and "
        f"the same quant_method on every rank, or none on any."
    )


def _fill_in(head: object) -> str:
    initial, facts, because = _vote(head)
    return f"{initial}{digest(facts)}{facts}\n{because}"


def _vote(head: object) -> tuple[str, str, str]:
    """Path's initial, facts and reason; whatever reading the head raises is a refusal, since the peers are voting."""
    try:
        path, because = admit(head)
        return path[0], head_facts(head), because
    except AdmissionError as error:
        return _REFUSED, "", str(error)
    except Exception as error:  # noqa: BLE001 - of the head's own code
        return _REFUSED, "", f"{type(error).__name__}: {error}"


def _gather(ballot: str, group: dist.ProcessGroup | None, device: torch.device) -> list[str]:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [ballot]
    data = ballot.encode()[:BALLOT_BYTES]
    ours = torch.tensor([*data, *bytes(BALLOT_BYTES - len(data))], dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(ours) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, ours, group=group)
    return [_read(one) for one in gathered]


def _read(data: Tensor) -> str:
    return bytes(data.tolist()).rstrip(b"\0").decode(errors="ignore")


def _told(ballots: Sequence[str]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, ballot in enumerate(ballots):
        ranks_of.setdefault(ballot, []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks))} {_choice(ballot)}" for ballot, ranks in ranks_of.items())


def _choice(ballot: str) -> str:
    path, (facts, _, because) = _PATHS.get(ballot[0]), ballot[_DECIDES:].partition("\n")
    return f"refuses ({because})" if path is None else f"goes {path} ({because}) with {facts}"
