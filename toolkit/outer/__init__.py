"""DiLoCo (arXiv:2311.08105) around any engine: replicas train on their own and exchange how
their weights have changed every few steps, by torchft (docs/launchers.md)."""
