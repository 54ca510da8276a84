"""Planning: which matrices there are and, from the next milestone on, who owns them.

Pure Python on integers: no torch, no torch.distributed, no Megatron.
"""
