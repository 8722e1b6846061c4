"""Whether a checkpoint that ties its head to the embedding also holds the head, and if so the same one."""

from autoport.research.source import Source
from autoport.schema.facts import Checkpoint, Fact

HEAD = "lm_head.weight"
EMBEDDINGS = ("model.embed_tokens.weight", "embed_tokens.weight")
SAMPLES = 16
SAMPLE_BYTES = 4096


def compare_head(source: Source, checkpoint: Checkpoint) -> Fact | None:
    """Compare `lm_head.weight` with the embedding at up to 16 places of 4 KiB; None unless both are there.

    Raises:
        Refusal: what `Source.read` refuses.
    """
    head = checkpoint.tensors.get(HEAD)
    embedding = next((checkpoint.tensors[key] for key in EMBEDDINGS if key in checkpoint.tensors), None)
    if head is None or embedding is None:
        return None
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return Fact(False, "derived: lm_head.weight and the embedding differ in dtype or shape")
    count = min(SAMPLES, -(-head.num_bytes // SAMPLE_BYTES))
    for sample in range(count):
        start = (head.num_bytes - SAMPLE_BYTES) * sample // max(1, count - 1) if count > 1 else 0
        length = min(SAMPLE_BYTES, head.num_bytes)
        pair = [source.read(tensor.file, tensor.offset + start, length) for tensor in (head, embedding)]
        if pair[0] != pair[1]:
            return Fact(False, f"derived: the bytes differ from offset {start} of the tensors")
    return Fact(True, f"derived: equal in {count} samples of {SAMPLE_BYTES} bytes")
