"""The server: ``python -m dflash_jax.serve``."""
