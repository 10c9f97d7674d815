"""What runs only on CUDA: Triton kernels and the passes built from them."""
