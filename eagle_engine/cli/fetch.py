"""eagle fetch: the demo target."""

from __future__ import annotations

import argparse

from eagle_engine.cli.common import print_json, show_progress
from eagle_engine.demo import fetch_demo


def run(args: argparse.Namespace) -> int:
    path = fetch_demo(show_progress())
    if args.json:
        print_json({"path": str(path), "bytes": path.stat().st_size})
    else:
        print(path)
    return 0
