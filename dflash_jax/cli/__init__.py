"""What ``python -m dflash_jax`` can do, one module a command."""
