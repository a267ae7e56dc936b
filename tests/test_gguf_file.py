from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_jax.config import RopeConfig, TargetConfig
from dflash_jax.gguf_file import CheckpointError, read_gguf

CONFIG = TargetConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(1e4),
    max_position_embeddings=64,
    architecture="llama",
    tie_word_embeddings=False,
    qk_norm=False,
)


def every_kind(writer: GGUFWriter) -> None:
    writer.add_uint8("t.u8", 250)
    writer.add_int8("t.i8", -3)
    writer.add_uint16("t.u16", 65000)
    writer.add_int16("t.i16", -300)
    writer.add_int32("t.i32", -70000)
    writer.add_float32("t.f32", 0.1)
    writer.add_float64("t.f64", 0.1)
    writer.add_uint64("t.u64", 2**63)
    writer.add_int64("t.i64", -(2**62))
    writer.add_bool("t.bool", True)
    writer.add_string("t.string", "é🎉")
    writer.add_array("t.strings", ["a", "", "ü"])
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.floats", [0.5, 0.25])
    writer.add_custom_alignment(64)


@pytest.fixture
def whole(tmp_path: Path, write_gguf) -> Path:
    return write_gguf(tmp_path / "m.gguf", CONFIG, every_kind)


def test_all_is_read_as_the_gguf_package_reads_it(whole: Path) -> None:
    ours, theirs = read_gguf(whole), GGUFReader(whole)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.value(name) == field.contents(), name
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(ours.tensors[tensor.name].read(), tensor.data)


def test_missing_values_are_named_or_defaulted(whole: Path) -> None:
    file = read_gguf(whole)
    assert file.value("no.such", 3) == 3
    with pytest.raises(CheckpointError, match=r"no\.such"):
        file.value("no.such")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cut_file_is_refused(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = whole.read_bytes()
    size = data.draw(st.integers(0, len(content) - 1))
    # The writer pads the end to the alignment: cutting padding alone loses nothing.
    last = read_gguf(whole).tensors.values()
    (tmp_path / "cut.gguf").write_bytes(content[:size])
    try:
        file = read_gguf(tmp_path / "cut.gguf")
    except CheckpointError as error:
        assert "cut.gguf is not a whole GGUF file" in str(error)
    else:
        assert len(content) - size < 64
        for tensor, original in zip(file.tensors.values(), last, strict=True):
            np.testing.assert_array_equal(tensor.data, original.data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 600), byte=st.integers(0, 255))
def test_a_changed_header_is_read_or_refused(
    whole: Path, tmp_path: Path, at: int, byte: int
) -> None:
    content = bytearray(whole.read_bytes())
    content[at] = byte
    (tmp_path / "bent.gguf").write_bytes(content)
    try:
        read_gguf(tmp_path / "bent.gguf")
    except CheckpointError as error:
        assert "bent.gguf" in str(error)


def test_other_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    for content, named in ((b"PK\3\4____", "begins with"), (b"GGUF\0\0\0\3", "version 50331648")):
        other.write_bytes(content)
        with pytest.raises(CheckpointError, match=named):
            read_gguf(other)


def test_an_untied_file_has_a_head(tmp_path: Path, write_gguf) -> None:
    assert "output.weight" in read_gguf(write_gguf(tmp_path / "a.gguf", CONFIG)).tensors
    tied = write_gguf(tmp_path / "b.gguf", replace(CONFIG, tie_word_embeddings=True))
    assert "output.weight" not in read_gguf(tied).tensors
