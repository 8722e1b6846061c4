"""Models, their registry, and the types a model and the runner exchange."""
