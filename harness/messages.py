"""Messages: sends and receives that belong together and do not fit, or have no other end at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpbed.harness.findings import Cause, Finding, name_group
from tpbed.tp.ledger import DROPPED, Ledger, MessageRecord
from tpbed.tp.messages import Mail


def find_unfit_messages(ledgers: Sequence[Ledger]) -> list[Finding]:
    """The first message of each group whose ends differ in dtype or bytes.

    gloo says nothing if the receive is larger, or of another dtype, and ends the process of the receiver if it is too
    small; NCCL calls all of it undefined. With two ends, neither is the odd one out: both ranks are named.
    """
    first: dict[str, Finding] = {}
    for source, send, target, receive in Mail(ledgers).pairs():
        if (send.dtype, send.payload_bytes) != (receive.dtype, receive.payload_bytes) and send.group not in first:
            first[send.group] = _unfit(source, send, target, receive, ledgers)
    return list(first.values())


def _unfit(source: int, send: MessageRecord, target: int, receive: MessageRecord, ledgers: Sequence[Ledger]) -> Finding:
    sent, expected = f"{send.dtype} {send.shape}", f"{receive.dtype} {receive.shape}"
    return Finding(
        kind="mismatch",
        ranks=tuple(sorted((source, target))),
        op=send.op,
        seq=send.seq,
        group=send.group,
        step=send.step,
        text=f"a message of {name_group(send.group, ledgers)} from rank {source} to rank {target} is {sent}, received "
        f"as {expected}",
        causes=(
            Cause(rank=source, text=f"rank {source} sends {sent} at {send.site}", site=send.site),
            Cause(rank=target, text=f"rank {target} receives {expected} at {receive.site}", site=receive.site),
        ),
    )


def find_lone_messages(ledgers: Sequence[Ledger]) -> list[Finding]:
    """The first message whose other end was never called, though nobody waits for it."""
    return list(_lone(ledgers))[:1]


def _lone(ledgers: Sequence[Ledger]) -> Iterator[Finding]:
    for rank, record, peer in Mail(ledgers).unpaired():
        dropped = record.error == DROPPED
        message = tell_message(record, ledgers)
        odd, told = (rank, _told_dropped(rank, message)) if dropped else (peer, _told_lone(rank, record, peer, message))
        yield Finding(
            kind="mismatch",
            ranks=(odd,),
            op=record.op,
            seq=record.seq,
            group=record.group,
            step=record.step,
            text=f"{message} has no other end, and nobody waited",
            causes=(Cause(rank=odd, text=told, site=record.site),),
        )


def _told_dropped(rank: int, message: str) -> str:
    return f"rank {rank} let go of the handle of {message} before the other end had come"


def _told_lone(rank: int, record: MessageRecord, peer: int, message: str) -> str:
    does = "receives" if record.op == "send" else "sends"
    return f"rank {peer} never {does} what rank {rank} asks it to with {message}"


def tell_message(record: MessageRecord, ledgers: Sequence[Ledger]) -> str:
    """`send 3 of group world to member 1, tag 7`."""
    way = "to" if record.op == "send" else "from"
    peer = "anybody" if record.peer is None else f"member {record.peer}"
    return f"{record.op} {record.seq} of {name_group(record.group, ledgers)} {way} {peer}" + (
        f", tag {record.tag}" * bool(record.tag)
    )
