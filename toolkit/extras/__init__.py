"""What not every user needs: the core reaches it through registries only, and works without it."""
