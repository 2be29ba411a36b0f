"""Independent random streams from one seed."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, purpose: str, *, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one purpose: streams of two seeds or two purposes have nothing in common."""
    return torch.Generator(device).manual_seed(derived_seed(seed, purpose))


def derived_seed(seed: int, purpose: str) -> int:
    """A 63-bit seed from SHA-256 of the seed and the purpose."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:8], "little") >> 1
