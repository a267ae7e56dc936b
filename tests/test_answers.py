"""Answer files: what a killed process leaves, and what must not be mixed."""

import json
from pathlib import Path

import pytest

from train.answers import AnswerFile, check_settings, claim, skipped_path
from train.samples import DataError


def ids(path: Path) -> list[str]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_a_torn_line_is_cut_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "made" / "answers.jsonl"
    with AnswerFile(path) as file:
        file.write("a", {"x": 1})
        file.skip('b"\n', "s", "too long")
        file.write("c", {"x": 2})
    whole = path.read_bytes()
    for torn in (whole[:-1], whole[:-5], whole + b'{"id": "d"', whole + b"{"):
        path.write_bytes(torn)
        with AnswerFile(path) as file:
            complete = torn.count(b"\n")
            assert file.done == {"a", 'b"\n'} | ({"c"} if complete == 2 else set())
            assert path.read_bytes() == torn[: torn.rindex(b"\n") + 1]
            for id in {"c", "d"} - file.done:
                file.write(id, {"x": 2})
        assert sorted(ids(path)) == ["a", "c", "d"]
    assert json.loads(skipped_path(path).read_text())["reason"] == "too long"


def test_lines_reach_the_file_at_once_and_ids_once(tmp_path: Path) -> None:
    with AnswerFile(tmp_path / "a") as file:
        file.write("a", {})
        assert ids(tmp_path / "a") == ["a"]
        with pytest.raises(ValueError, match="'a' is written already"):
            file.write("a", {})
        with pytest.raises(ValueError, match="'a' is written already"):
            file.skip("a", "s", "r")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with AnswerFile(tmp_path / "a"), pytest.raises(DataError, match="written by another process"):
        AnswerFile(tmp_path / "a")
    with AnswerFile(tmp_path / "a"):
        pass


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"id": "x"}\n{"text": "mine"}\ntorn')
    with pytest.raises(DataError, match="a:2: not a line of answers"):
        AnswerFile(tmp_path / "a")
    assert (tmp_path / "a").read_text().endswith("torn")
    (tmp_path / "a").write_text('{"id": x}\n')
    with pytest.raises(DataError, match="a:1: not a line of answers"):
        AnswerFile(tmp_path / "a")


def test_a_folder_belongs_to_its_settings(tmp_path: Path) -> None:
    folder, settings = tmp_path / "answers", {"temperature": 0.6, "kwargs": {"a": False}}
    assert not check_settings(folder, settings) and not folder.exists()
    for _ in range(2):
        claim(folder, settings)
        assert check_settings(folder, settings)
    assert [path.name for path in folder.iterdir()] == ["settings.json"]
    with pytest.raises(DataError, match=r"under temperature = 0.6, and this run asks for 1.0"):
        claim(folder, settings | {"temperature": 1.0})
    with pytest.raises(DataError, match=r'under kwargs = {"a": false}.* asks for null'):
        check_settings(folder, {"temperature": 0.6})
    with pytest.raises(DataError, match=r"under top_p = null, and this run asks for 0.9"):
        check_settings(folder, settings | {"top_p": 0.9})
    (folder / "settings.json").write_text("[")
    with pytest.raises(DataError, match=r"settings.json, .* cannot be read"):
        check_settings(folder, settings)
