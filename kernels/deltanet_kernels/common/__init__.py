"""Parts that kernels of every operator share: launching, registration with PyTorch, sequences, tiles, device facts."""
