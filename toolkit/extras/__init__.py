"""Features that not every user needs. The core finds them through registries and works without
them."""
