"""Compare the last two stored runs of this machine: ``python -m benchmarks.compare STORAGE``.

Times of a shared machine drift, so what is compared are the figures that a run measured against something in itself:
the ratio to the copy bandwidth and the speedups over peers. The exit status is 1 if any fell by more than 15 %.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ALLOWED = 0.85


def figures(run: dict) -> dict[tuple[str, str], float]:
    found = {}
    for case in run["benchmarks"]:
        info = case["extra_info"]
        if "ratio_to_copy" in info:
            found[case["name"], "copy bandwidth"] = info["ratio_to_copy"]
        found |= {(case["name"], peer): factor for peer, factor in info.get("speedups", {}).items()}
    return found


def machine(run: dict) -> tuple[str, str, int]:
    info = run["machine_info"]
    return info["node"], info["cpu"].get("brand_raw", ""), info["cpu"].get("count", 0)


def main(storage: str) -> int:
    paths = sorted(Path(storage).rglob("[0-9][0-9][0-9][0-9]_*.json"), key=lambda path: path.stat().st_mtime)
    runs = [json.loads(path.read_text()) for path in paths]
    if not runs:
        print(f"no stored run under {storage}; run `make bench` first", file=sys.stderr)
        return 2
    now = runs[-1]
    earlier = [run for run in runs[:-1] if machine(run) == machine(now)]
    if not earlier:
        print("this is the first stored run of this machine: nothing to compare with yet")
        return 0
    before, after = figures(earlier[-1]), figures(now)
    slower = 0
    for key in sorted(before.keys() & after.keys()):
        change = after[key] / before[key]
        mark = "SLOWER" if change < ALLOWED else ""
        slower += bool(mark)
        print(f"{key[0]:44} against {key[1]:28} {before[key]:8.2f} -> {after[key]:8.2f}  {change:5.2f} {mark}")
    print(f"{slower} figures fell by more than {1 - ALLOWED:.0%}" if slower else "no slowdown")
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
