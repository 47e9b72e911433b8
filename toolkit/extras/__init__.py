"""What not every user needs. The core reaches it through registries and works without it."""
