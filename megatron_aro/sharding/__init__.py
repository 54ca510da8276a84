"""Planning: which matrices there are, which rank owns each, and which elements travel.

Pure Python on integers: no torch, no torch.distributed, no Megatron.
"""
