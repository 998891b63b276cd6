"""What medconv claims of a CUDA machine: one module for each group of claims, and what runs them."""
