"""A rank's training step on GPUs that are not there: fake tensors, which have shapes, types and
devices but no elements, and a process group that sends nothing."""
