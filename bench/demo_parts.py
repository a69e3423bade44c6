"""The demo target in parts, for a way that carries small files only: `split FOLDER` here, `join FOLDER` there, `where` says whether it is in place."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from eagle_engine.demo import _FILE, _SHA256, _SIZE, _sha256, demo_target_path
from eagle_engine.weight_cache import cache_directory

PART_BYTES = 30 << 20


def split(source: Path, folder: Path) -> list[Path]:
    """Parts named as the file, .000, .001, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    with open(source, "rb") as file:
        while block := file.read(PART_BYTES):
            parts.append(folder / f"{source.name}.{len(parts):03d}")
            parts[-1].write_bytes(block)
    return parts


def join(folder: Path, destination: Path, sha256: str) -> None:
    """The file appears under its name only when it is whole and right."""
    parts = sorted(folder.glob(f"{destination.name}.[0-9][0-9][0-9]"))
    if not parts:
        raise SystemExit(f"{folder}: expected {destination.name}.000 and so on, got no such file")
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_suffix(".partial")
    with open(partial, "wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    found = _sha256(partial)
    if found != sha256:
        partial.unlink()
        raise SystemExit(f"{folder}: the {len(parts)} parts together have checksum {found}, expected {sha256}; is one missing?")
    os.replace(partial, destination)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("split", "join", "where"))
    parser.add_argument("folder", type=Path, nargs="?")
    args = parser.parse_args()
    path = cache_directory() / "demo" / _FILE
    if args.what != "where" and args.folder is None:
        parser.error(f"{args.what} needs a folder")
    if args.what == "split":
        print("\n".join(map(str, split(demo_target_path(), args.folder))))
    elif args.what == "join":
        join(args.folder, path, _SHA256)
        print(path)
    elif path.is_file() and path.stat().st_size == _SIZE:
        print(path)
    else:
        print(f"the demo target is not at {path}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
