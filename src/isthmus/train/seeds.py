"""Independent random streams from one seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def generator(seed: int, purpose: str, *, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one purpose: streams of two seeds or two purposes have nothing in common."""
    return torch.Generator(device).manual_seed(derived_seed(seed, purpose))


def derived_seed(seed: int, purpose: str) -> int:
    """A 63-bit seed from SHA-256 of the seed and the purpose."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:8], "little") >> 1


@contextmanager
def global_seed(seed: int, purpose: str, device: torch.device) -> Iterator[None]:
    """Seed torch's global random state of the CPU and of ``device``, and put it back afterwards.

    Initial weights and dropout draw from it.
    """
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        # torch.manual_seed would seed every GPU, and only what was forked comes back
        torch.default_generator.manual_seed(derived_seed(seed, purpose))
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(derived_seed(seed, purpose))
        yield
