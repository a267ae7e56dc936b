"""Imports point one way: pallas_kernels <- dflash_jax <- train, dflash_jax.serve on top."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What each part may import of ours; `dflash_jax` here is the library without its server.
MAY_IMPORT = {
    "pallas_kernels": {"pallas_kernels"},
    "dflash_jax": {"pallas_kernels", "dflash_jax"},
    "dflash_jax.serve": {"pallas_kernels", "dflash_jax", "dflash_jax.serve"},
    "train": {"pallas_kernels", "dflash_jax", "train"},
}
OURS = {*MAY_IMPORT, "serve", "tests"}


def part_of(module: str) -> str:
    in_server = module == "dflash_jax.serve" or module.startswith("dflash_jax.serve.")
    return "dflash_jax.serve" if in_server else module.partition(".")[0]


def imports(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("top", ["pallas_kernels", "dflash_jax", "train"])
def test_imports_point_one_way(top: str) -> None:
    for file in sorted((ROOT / top).rglob("*.py")):
        relative = file.relative_to(ROOT).with_suffix("")
        allowed = MAY_IMPORT[part_of(".".join(relative.parts))]
        wrong = {m for m in imports(file) if part_of(m) in OURS - allowed}
        assert not wrong, f"{relative} must not import {sorted(wrong)}"
