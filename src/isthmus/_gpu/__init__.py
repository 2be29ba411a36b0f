"""From columns of tensors and plans to what kernels on a GPU are launched with: one module for each backend."""
