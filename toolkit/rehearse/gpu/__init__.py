"""A rank's training step on fake GPUs: fake tensors, which have shapes, dtypes and devices but
no elements, and a fake process group."""
