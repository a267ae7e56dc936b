from pathlib import Path

import pytest

from dflash_jax import resolve as resolve_module
from dflash_jax.resolve import ALLOW_PATTERNS, ResolveError, resolve

CONSTANTS = "huggingface_hub.constants"


def test_local_folders_and_files_are_taken_as_they_are(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    for path in (tmp_path, gguf):
        assert resolve(path) == path
        assert resolve(str(path)) == path


@pytest.mark.parametrize("name", ["./gone", "gone.gguf", "a/b/c", "../x", "https://a/b"])
def test_what_is_neither_a_path_nor_an_id_never_asks_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve_module, "snapshot_download", pytest.fail)
    with pytest.raises(ResolveError, match=r"does not exist; accepted: an HF folder, a \.gguf"):
        resolve(name)


def test_the_empty_name_is_not_the_working_directory() -> None:
    with pytest.raises(ResolveError, match="empty"):
        resolve("")


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    pickle = tmp_path / "pytorch_model.bin"
    pickle.touch()
    with pytest.raises(ResolveError, match="a file of another kind"):
        resolve(pickle)


def test_offline_an_unknown_id_says_what_was_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(f"{CONSTANTS}.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(f"{CONSTANTS}.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ResolveError, match=r"nobody/nothing: no such path here.*Qwen/Qwen3-4B"):
        resolve("nobody/nothing")


def test_offline_a_cached_id_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(f"{CONSTANTS}.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(f"{CONSTANTS}.HF_HUB_CACHE", str(tmp_path))
    assert resolve("some/model") == snapshot


def test_neither_pickles_nor_code_are_downloaded() -> None:
    for name in ("pytorch_model.bin", "modeling_x.py", "model.pt", "training_args.bin"):
        assert not any(Path(name).match(pattern) for pattern in ALLOW_PATTERNS)
