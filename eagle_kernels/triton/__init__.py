"""Triton kernels, one file per op, each with its launcher. A launcher takes the arguments of the op of the same name in `torch.ops.eagle_kernels`."""
