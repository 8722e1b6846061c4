"""What the heads of a model allow of TP sizes."""

from autoport.analysis.dimensions import Dimensions
from autoport.schema.parallel import Violation

NOT_IN_KERNEL = "this attention does not run in it: --relax even-heads costs nothing"


def candidate_sizes(num_heads: int, cores: int = 64) -> list[int]:
    """Powers of two and divisors of the head count, up to the logical cores of an instance."""
    divisors = (size for size in range(1, cores + 1) if num_heads % size == 0)
    powers = (2**exponent for exponent in range(cores.bit_length()) if 2**exponent <= cores)
    return sorted({*powers, *divisors})


def head_violations(size: Dimensions, tp: int) -> list[Violation]:
    """The rules about heads, R1 to R3, that `tp` breaks, with the numbers."""
    heads, kv = size.num_heads, size.num_kv_heads
    broken = []
    if heads % tp:
        broken.append(Violation("R1", f"{heads} heads are not a multiple of {tp}"))
    elif heads // tp % 2:
        text = f"{heads} heads / {tp} = {heads // tp} per rank is odd; the decode kernel needs an even number"
        text += f", and {NOT_IN_KERNEL}" if size.composed else ""
        broken.append(Violation("R2", text))
    if kv % tp and tp % kv:
        broken.append(Violation("R3", f"{kv} KV heads neither divide nor are divided by {tp}"))
    return broken
