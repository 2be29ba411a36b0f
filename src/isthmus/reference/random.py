"""Random masks that depend on a seed, a model, a tensor's name and an element's index, and on nothing else.

Philox4x32-10 is a counter-based generator: a bijection of 128 bits, keyed by 64, whose outputs for successive counters
are statistically independent (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011). Any
element's bits can be computed alone, so masks are the same on every backend, thread count, chunk and shard.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key words after each round
_LOW = 0xFFFFFFFF


def random_keys(seed: int, names: Sequence[str], models: int) -> Tensor:
    """The key and the upper half of the counter for each tensor of each model: int64 (rows, models, 4).

    The four 32-bit words k₀ k₁ c₂ c₃ are the first 16 bytes, little endian, of SHA-256 over "isthmus", the seed and the
    model's position (8 bytes each, little endian) and the tensor's canonical name in UTF-8.
    """
    heads = [struct.pack("<7sQQ", b"isthmus", seed, model) for model in range(models)]
    words = [
        [struct.unpack("<4I", hashlib.sha256(head + name.encode()).digest()[:16]) for head in heads] for name in names
    ]
    return torch.tensor(words, dtype=torch.int64).view(len(names), models, 4)


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of four counter words and two key words; every word is an int64 that holds 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The low 64 bits of the product are exact in wrapping int64 arithmetic.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _LOW) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32 & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def random_words(key: Sequence[int], start: int, numel: int, device: torch.device) -> Tensor:
    """The 32 random bits, as int64, of the elements ``start`` to ``start + numel`` of a tensor with this key.

    Element i has word i mod 4 of the output for the counter (low 32 bits of ⌊i/4⌋, high 32 bits of it, c₂, c₃).
    """
    k0, k1, c2, c3 = key
    first, last = start // 4, -(-(start + numel) // 4)
    block = torch.arange(first, last, device=device)
    output = philox((block & _LOW, block >> 32, torch.full_like(block, c2), torch.full_like(block, c3)), (k0, k1))
    return torch.stack(output, dim=-1).view(-1)[start - 4 * first :][:numel]
