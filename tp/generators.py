"""Random generators of a process - torch's, NumPy's and Python's - of which a rank holds the state as its own."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from tpbed.tp.registers import START_SEED, QuietRegister

_WORDS_BYTES = 2496  # 624 words
_TWISTER_BYTES = 2500  # the same and an index: a Mersenne twister in memory
_GLANCE_BYTES = 68  # of it: the index and 16 words
_NUMPY: Any = np.random
_PYTHON: Any = vars(random)["_inst"]
_DEVIATE = partial(getattr, _PYTHON, "gauss_next")


class TorchRandom(QuietRegister):
    """torch's default CPU generator. Its state is 5 KB; whether a rank has used it shows in its memory."""

    def __init__(self) -> None:
        self._start = torch.Generator().manual_seed(START_SEED).get_state()
        address = _torch_twister(torch.default_generator)
        self._looks = (object,) if address is None else tuple(_memory(address + at, size) for at, size in _TORCH_GLANCE)

    def save(self) -> Any:
        """A copy."""
        return torch.default_generator.get_state()

    def load(self, saved: Any) -> None:
        """Into torch."""
        torch.default_generator.set_state(saved)

    def looks(self) -> Sequence[Callable[[], Any]]:
        """Seed, index and the first words; then the last words, and normal deviates that are kept for the next call."""
        return self._looks

    def start(self) -> Any:
        """As after torch.manual_seed(START_SEED)."""
        return self._start


_TORCH_HEAD_BYTES = 20  # seed, how many are left, whether it is seeded, the next: then come the words
_TORCH_GLANCE = ((-_TORCH_HEAD_BYTES, _TORCH_HEAD_BYTES + 64), (_WORDS_BYTES - 64, 64 + 28))


def _memory(address: int, size: int) -> Callable[[], bytes]:
    """Reads that many bytes there."""
    return memoryview((ctypes.c_char * size).from_address(address)).tobytes


def _torch_twister(generator: Any) -> int | None:
    """Where the words of a torch generator lie; None where this torch does not lay them out as it should."""
    held = np.frombuffer(generator.get_state().numpy().tobytes(), np.uint64)[3 : 3 + 624]
    words = held.astype(np.uint32).tobytes()
    start = ctypes.c_void_p.from_address(id(generator) + object.__basicsize__).value or 0
    for address in range(start + _TORCH_HEAD_BYTES, start + 256, 4) if start else ():
        if ctypes.string_at(address, 64) == words[:64] and ctypes.string_at(address, _WORDS_BYTES) == words:
            return address
    return None


class NumpyRandom(QuietRegister):
    """NumPy's global generator.

    NumPy copies it in 25 us. Whether a rank has used it shows in the tail of its twister, which is compared in place;
    only the second of two normal deviates leaves that as it is, and it is known from the copy made after the first.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._twister: Any = None
        self._loaded: Any = (None, b"", None)  # generator, words of its twister, NumPy's own copy of its state
        state = np.random.RandomState(START_SEED).get_state(legacy=False)
        self._start = (np.random.MT19937(), _numpy_words(state), state)

    def save(self) -> Any:
        """The same object again where nothing has changed."""
        now, (generator, words, state) = self._look(), self._loaded
        if generator is not self._generator or not now or not words.endswith(now) or state["has_gauss"]:
            words = self._twister.words.raw if self._twister else b""
            self._loaded = (self._generator, words, _NUMPY.get_state(legacy=False))
        return self._loaded

    def load(self, saved: Any) -> None:
        """Into the global generator; by its words where these say all."""
        known, self._loaded = self._loaded, saved
        if saved is known:
            return
        if self._look() and self._generator is saved[0] and not known[2]["has_gauss"] and not saved[2]["has_gauss"]:
            ctypes.memmove(self._twister.words, saved[1], _TWISTER_BYTES)
            return
        _NUMPY.set_bit_generator(saved[0])
        _NUMPY.set_state(saved[2])

    def start(self) -> Any:
        """As after numpy.random.seed(START_SEED)."""
        generator = _NUMPY.get_bit_generator()
        if generator is not self._start[0] and type(generator) is np.random.MT19937:
            self._start = (generator, *self._start[1:])
        return self._start

    def looks(self) -> Sequence[Callable[[], Any]]:
        """The generator, and the tail of its twister."""
        quiet = self._look() and self._loaded[2] and not self._loaded[2]["has_gauss"]
        return (_NUMPY.get_bit_generator, self._twister.look) if quiet else (object,)

    def _look(self) -> bytes:
        generator = _NUMPY.get_bit_generator()
        if generator is not self._generator:
            self._generator, self._twister = generator, _numpy_twister(generator)
        return self._twister.tail.raw if self._twister else b""


class _Twister:
    """A Mersenne twister in memory. Every draw moves its index, or renews all words: a few of them tell."""

    __slots__ = ("head", "look", "tail", "words")

    def __init__(self, address: int) -> None:
        self.words = (ctypes.c_char * _TWISTER_BYTES).from_address(address)
        self.head = (ctypes.c_char * _GLANCE_BYTES).from_address(address)
        self.tail = (ctypes.c_char * _GLANCE_BYTES).from_address(address + _TWISTER_BYTES - _GLANCE_BYTES)
        self.look = memoryview(self.tail).tobytes


def _numpy_words(state: Any) -> bytes:
    words = state["state"]
    return bytes(words["key"].tobytes() + int(words["pos"]).to_bytes(4, sys.byteorder))


def _numpy_twister(generator: Any) -> _Twister | None:
    """The generator's memory, at the address that NumPy makes public; None where it is not laid out as it should be."""
    if type(generator) is not np.random.MT19937:
        return None
    twister = _Twister(generator.ctypes.state_address)
    return twister if twister.words.raw == _numpy_words(generator.state) else None


class PythonRandom(QuietRegister):
    """The generator of the `random` module.

    Python copies it in 7 us; its memory takes a fraction of one. Whether a rank has used it shows in its head.
    """

    def __init__(self) -> None:
        self._twister = _python_twister(_PYTHON)
        self._looks = (memoryview(self._twister.head).tobytes, _DEVIATE) if self._twister else (object,)
        state = random.Random(START_SEED).getstate()
        self._start: Any = (_python_words(state), None) if self._twister else state

    def save(self) -> Any:
        """The words of the twister and the normal deviate; or Python's own copy."""
        return (self._twister.words.raw, _PYTHON.gauss_next) if self._twister else random.getstate()

    def load(self, saved: Any) -> None:
        """Into the module."""
        if self._twister:
            ctypes.memmove(self._twister.words, saved[0], _TWISTER_BYTES)
            _PYTHON.gauss_next = saved[1]
        else:
            random.setstate(saved)

    def start(self) -> Any:
        """As after random.seed(START_SEED)."""
        return self._start

    def looks(self) -> Sequence[Callable[[], Any]]:
        """The head of its twister, and the normal deviate that is kept for the next call."""
        return self._looks


def _python_words(state: Any) -> bytes:
    *words, index = state[1]
    return b"".join(word.to_bytes(4, sys.byteorder) for word in (index, *words))


def _python_twister(generator: random.Random) -> _Twister | None:
    """The generator's memory; None where this Python does not lay it out as an index and its words."""
    header = object.__basicsize__
    if type(generator).__basicsize__ < header + _TWISTER_BYTES:
        return None
    twister = _Twister(id(generator) + header)
    return twister if twister.words.raw == _python_words(generator.getstate()) else None
