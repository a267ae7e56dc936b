"""Compiled programs kept between runs, in the user's cache folder."""

from pathlib import Path

import jax

from dflash_jax.embedded import default_cache_dir


def default_compilation_cache_dir() -> Path:
    return default_cache_dir() / "xla"


def keep_compilations(folder: Path) -> None:
    """Keep what this process compiles in ``folder``, for later runs. A setting of the whole
    process: programs call it, the library does not."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Half of a small pair's start is programs that compile in less than JAX's own limit of 1 s.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
