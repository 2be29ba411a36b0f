"""Triton kernels for GPUs, and the functions that launch them.

Each module holds one family of ops; what they compute is said in ``isthmus.reference``, to whose bits they are equal
where ``isthmus.ops`` promises it. Arguments are valid here. This package imports torch and triton alone, and triton
only in the modules that hold kernels: tables serve CUDA C++ as well.
"""
