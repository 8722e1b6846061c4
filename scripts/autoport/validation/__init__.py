"""The proof on the CPU and the steps of Phase C."""
