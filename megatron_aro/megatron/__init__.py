"""Integration: the only layer that imports Megatron."""
