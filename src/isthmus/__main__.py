"""``python -m isthmus`` is the command ``isthmus``."""

from __future__ import annotations

from isthmus.cli import main

main()
