"""DFlash speculative decoding for JAX."""
