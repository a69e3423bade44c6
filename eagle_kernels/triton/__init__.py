"""Triton kernels of the ops, and the launchers that `eagle_kernels._cuda` registers for CUDA tensors."""
