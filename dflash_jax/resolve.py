"""From what a user names (a path or a Hub id) to files on this machine."""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

# Weights as safetensors only; no pickles and no code ever reach the disk.
ALLOW_PATTERNS = ["*.safetensors", "*.json", "tokenizer.model", "*.txt", "*.jinja"]
ACCEPTED = "accepted: an HF folder, a .gguf file, or a Hugging Face Hub id such as Qwen/Qwen3-4B"


class ResolveError(ValueError):
    """A model name that leads to no files; the message says what was tried and is accepted."""


def resolve(name_or_path: str | Path) -> Path:
    """The local folder or .gguf file of a model, downloaded from the Hub where it is an id.

    Raises ResolveError when it is neither a path that exists nor an id the Hub (or its local
    cache, when offline) knows.
    """
    name = str(name_or_path)
    if not name:  # pathlib would read it as the working directory
        raise ResolveError(f"the name is empty; {ACCEPTED}")
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise ResolveError(f"{name} is a file of another kind; {ACCEPTED}")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or path.suffix == ".gguf":
        raise ResolveError(f"{name} does not exist; {ACCEPTED}")
    try:
        return Path(snapshot_download(name, allow_patterns=ALLOW_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ResolveError(
            f"{name}: no such path here, and the Hub gave nothing ({first_line}); {ACCEPTED}"
        ) from error
