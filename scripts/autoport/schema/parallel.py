"""Tensor and expert parallelism: every size with the rules that it breaks, and the memory of a rank."""

import msgspec


class Violation(msgspec.Struct, frozen=True):
    """A rule about parallel sizes, and what a size makes of it, with the numbers.

    Broken rules are ``R1`` to ``R4``, ``MEM``, ``DEV-INNER``, ``EP1`` and ``EP2``; ``PAD-INNER`` and ``PERF-...`` say
    what else follows from a size.
    """

    rule: str
    text: str


class WeightBytes(msgspec.Struct, frozen=True):
    """Bytes of weights in the port's dtype, before sharding, by how they are sharded.

    `embeddings` are the part of `split` that are embeddings and the head.
    """

    split: int = 0
    kv_heads: int = 0
    copied: int = 0
    embeddings: int = 0

    def __add__(self, other: "WeightBytes") -> "WeightBytes":
        return WeightBytes(
            *(
                a + b
                for a, b in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
            )
        )

    @property
    def total(self) -> int:
        return self.split + self.kv_heads + self.copied

    def per_rank(self, tp_size: int, num_kv_heads: int) -> int:
        """Bytes on one rank: a KV head is never split, so ranks beyond the KV heads hold copies."""
        kv_shards = min(tp_size, num_kv_heads)
        return self.copied + -(-self.split // tp_size) + -(-self.kv_heads // kv_shards)


class TpCandidate(msgspec.Struct, frozen=True):
    """One tensor-parallel size. `relaxed` lists rules it breaks that the user chose to relax.

    Attributes:
        embedding_bytes_per_rank: Part of the weights that are embeddings and the head.
        reserve_bytes: Kept for compiled graphs, activations and collectives.
        padded_vocab_size: The next multiple of the size.
        padded: Other sizes that are filled up with zeros (``PAD-INNER``).
        slow_paths: What the device will do without a fused operator at this size (``PERF-...``).
    """

    tp_size: int
    violations: list[Violation]
    relaxed: list[Violation]
    kv_heads_per_rank: int
    kv_replicas: int
    weight_bytes_per_rank: int
    kv_bytes_per_rank: int
    embedding_bytes_per_rank: int = 0
    reserve_bytes: int = 0
    padded_vocab_size: int = 0
    padded: list[Violation] = []
    slow_paths: list[Violation] = []

    @property
    def valid(self) -> bool:
        return not self.violations


class TpPlan(msgspec.Struct):
    """The tensor-parallel table of Step 2. `recommended` is None when no size is valid and fits.

    Attributes:
        context_length: Tokens per sequence that the KV-cache estimate is for.
        batch_size: Sequences that the KV-cache estimate is for.
        weight_limit_bytes: Weights per rank above which a size does not fit.
        instance, lnc, cores, bytes_per_core: What the table is for.
        parts: Bytes of the weights by parameter, or by part of the model where only its config is known.
        latent_cache: The cache is that of latent attention, whole on every rank.
        hardware_assumed: No document says what the instance has.
        reserve_assumed: Nobody has measured what has to be kept of a logical core.
        assumptions: What the numbers rest on and no document says.
    """

    candidates: list[TpCandidate]
    recommended: int | None
    context_length: int
    batch_size: int
    weight_limit_bytes: int
    instance: str = ""
    lnc: int = 0
    cores: int = 0
    bytes_per_core: int = 0
    parts: dict[str, WeightBytes] = {}
    latent_cache: bool = False
    num_kv_heads: int = 0
    hardware_assumed: bool = False
    reserve_assumed: bool = True
    assumptions: list[str] = []


class EpCandidate(msgspec.Struct, frozen=True):
    """One split of the world: sub-groups of `tp_size` ranks, experts divided among `ep_degree` of them."""

    tp_size: int
    ep_degree: int
    violations: list[Violation]
    experts_per_group: int
    weight_bytes_per_rank: int

    @property
    def valid(self) -> bool:
        return not self.violations


class EpPlan(msgspec.Struct, frozen=True):
    """Expert parallelism over all ranks of the instance. `recommended` is a sub-group size, or None."""

    world_size: int
    num_experts: int
    candidates: list[EpCandidate]
    recommended: int | None
    note: str
