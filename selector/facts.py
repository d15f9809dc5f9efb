"""Facts of a head that all ranks must share, or their candidates would be of several heads."""

from __future__ import annotations

from hashlib import sha256

DIGEST_CHARACTERS = 16


def head_facts(head: object) -> str:
    """What must be alike on every rank, as one line: the vocabulary, the hidden size, the dtypes and the format.

    Nothing that follows the rows of a shard is in it, such as an uneven width, nor what a rank may have for itself,
    such as the class of its quant method. Costs attributes and shapes, no look at any value.
    """
    shard, weight = getattr(head, "shard", None), getattr(head, "weight", None)
    facts = [_vocabulary(shard), f"weight {getattr(weight, 'dtype', None)}"]
    for name in ("logits_dtype", "hidden_size", "granularity", "layout"):
        value = getattr(head, name, None)
        facts += [f"{name} {value}"] if value is not None else []
    return ", ".join(facts).replace("torch.", "")


def digest(facts: str) -> str:
    """Sixteen characters that stand for facts of any length."""
    return sha256(facts.encode()).hexdigest()[:DIGEST_CHARACTERS]


def _vocabulary(shard: object) -> str:
    org, added = getattr(shard, "org_vocab_size", None), getattr(shard, "added_vocab_size", None)
    ranks, even = getattr(shard, "world_size", None), getattr(shard, "equal_widths", False)
    width = getattr(shard, "width", None) if even else "uneven"
    edges = getattr(shard, "edge_divisor", None)
    return f"{org} + {added} tokens over {ranks} ranks, width {width}, edges at multiples of {edges}"
