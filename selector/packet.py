"""Packet: a draft as rank 0 drew it, broadcast in one piece, so that no rank can go on with another one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.selector.errors import SelectionError
from tpbed.selector.walk import Draft


def agree_on_draft(draft: Draft, ids: Tensor, *, group: dist.ProcessGroup | None) -> tuple[Draft, Tensor]:
    """The draft and the candidates of the group's first rank, bit for bit, on every rank; every rank calls this.

    Merged candidates are the same everywhere, but hidden states, products and random generators are each rank's own.
    draft: tokens (requests, slots) int64, q_rows (requests, slots, K) float32. ids: (requests, slots, K) int64.
    Cost: one broadcast of (1 + 2 K) * 8 bytes per request and slot; none in a group of one.
    Raises SelectionError, before the broadcast, for shapes or dtypes that a packet cannot hold.
    Source: the selector packet of SGLang's SPEC_TP_SYNC (pull request 40246).
    """
    packet = pack_draft(draft, ids)
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.broadcast(packet, group_src=0, group=group)
    return unpack_draft(packet)


def pack_draft(draft: Draft, ids: Tensor) -> Tensor:
    """(requests, slots, 1 + 2 K) int64: the token, K ids, and the K bit patterns of q."""
    requests, slots, k = ids.shape
    found = (draft.tokens.shape, draft.tokens.dtype, draft.q_rows.shape, draft.q_rows.dtype, ids.dtype)
    if found != ((requests, slots), torch.int64, (requests, slots, k), torch.float32, torch.int64):
        raise SelectionError(
            f"tokens {tuple(draft.tokens.shape)} {draft.tokens.dtype}, q_rows {tuple(draft.q_rows.shape)} "
            f"{draft.q_rows.dtype} and ids {tuple(ids.shape)} {ids.dtype} do not make a packet: give (requests, slots) "
            f"int64, (requests, slots, K) float32 and (requests, slots, K) int64."
        )
    bits = draft.q_rows.contiguous().view(torch.int32).long()
    return torch.cat([draft.tokens.unsqueeze(-1), ids, bits], dim=-1)


def unpack_draft(packet: Tensor) -> tuple[Draft, Tensor]:
    """What pack_draft was given: the draft, and the candidates' ids."""
    k = packet.shape[-1] // 2
    q_rows = packet[..., 1 + k :].int().view(torch.float32)
    return Draft(tokens=packet[..., 0].clone(), q_rows=q_rows), packet[..., 1 : 1 + k].clone()
