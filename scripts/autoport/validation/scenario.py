"""The fixed scenario that the port and the Hugging Face class both run.

One run covers what serving does: a short prompt padded into its bucket, a longer one whose logits are
compared at every position, a prompt prefilled in two segments (the second one padded), and decode steps
through the paged cache with two sequences of different length in one batch, padded to a bucket of four.
"""

import random

import msgspec

BLOCK_SIZE = 32  # the plugin's default
MAX_MODEL_LEN = 1024

# Prompt lengths. SHORT and LONG are close below a multiple of the block size, so the decode steps cross into
# a new block; SEGMENTED takes one full segment and a part of a second one.
SHORT, LONG, SEGMENTED = 58, 150, 700
DECODE_STEPS = 12
SEGMENTED_DECODE_STEPS = 4

# Single-shot prefill needs buckets that end at max_model_len; segments come in the sizes that the kernel has.
SINGLE_SHOT_MODEL_LEN = 256
PREFILL_BUCKETS = [64, 256]
DECODE_BUCKETS = [4]
SEGMENT_SIZE = 512

NUM_BLOCKS = 1 + MAX_MODEL_LEN // BLOCK_SIZE  # block 0 is the null block

PREFILL_LAST = "prefill, last position"
PREFILL_ALL = "prefill, all positions"
DECODE_SHORT = "decode, shorter sequence"
DECODE_LONG = "decode, longer sequence"
SEGMENTED_LAST = "segmented prefill"
SEGMENTED_DECODE = "decode after segmented prefill"


class Phase(msgspec.Struct, frozen=True):
    """Logits that are compared.

    Attributes:
        prompt: Key of the prompt.
        start: First compared position of prompt and continuation.
        stop: One past the last compared position.
    """

    name: str
    prompt: str
    start: int
    stop: int


# In the order in which they run; the first one that fails says where to look.
PHASES = [
    Phase(PREFILL_LAST, "short", SHORT - 1, SHORT),
    Phase(PREFILL_ALL, "long", 0, LONG),
    Phase(SEGMENTED_LAST, "segmented", SEGMENTED - 1, SEGMENTED),
    Phase(DECODE_SHORT, "short", SHORT, SHORT + DECODE_STEPS),
    Phase(DECODE_LONG, "long", LONG, LONG + DECODE_STEPS),
    Phase(SEGMENTED_DECODE, "segmented", SEGMENTED, SEGMENTED + SEGMENTED_DECODE_STEPS),
]

# Prompt -> (length, decode steps).
LENGTHS = {
    "short": (SHORT, DECODE_STEPS),
    "long": (LONG, DECODE_STEPS),
    "segmented": (SEGMENTED, SEGMENTED_DECODE_STEPS),
}


def draw_prompts(vocab_size: int, seed: int) -> dict[str, list[int]]:
    """Return the prompts as token ids, drawn uniformly from the vocabulary."""
    draw = random.Random(seed)
    return {
        name: [draw.randrange(vocab_size) for _ in range(length)] for name, (length, _) in LENGTHS.items()
    }
