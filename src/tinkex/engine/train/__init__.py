"""Training: packing, losses, gradients and optimizers of many adapters over one base."""
