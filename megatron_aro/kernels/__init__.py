"""Triton kernels for ARO's step, each beside its torch twin; imports torch and Triton only."""
