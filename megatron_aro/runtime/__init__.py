"""Runtime: gathers matrices, steps them and returns the updates.

Imports torch (torch.distributed included), the mathematics and the planning; never Megatron.
"""
