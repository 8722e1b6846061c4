"""Names of the kernel language that models pass to operators."""
