"""The decode attention mask and its shuffled context axis.

The decode kernel spreads the context over 128 partitions, so position and row number differ. With an
effective block length L, row r of the mask stands for sequence position

    fold * 128 * L + part * L + off,   fold = r // (128 * L), off = r // 128 % L, part = r % 128.
"""

import math

import torch

from vllm_neuron.functional._numerics import PMAX, not_supported
from vllm_neuron.simulator import rules

OPERATOR = "gen_attention_decode_mask"


def is_batch_sharded(bs: int, q_head: int, s_active: int, s_prior: int) -> bool:
    """Whether the decode kernel divides the batch, not the context, over the two cores."""
    return bs % 2 == 0 and (bs * q_head * s_active >= PMAX or s_prior <= 2 * PMAX)


def context_shards(bs: int, q_head: int, s_active: int, s_prior: int) -> int:
    """Number of cores that the context axis is divided over."""
    if is_batch_sharded(bs, q_head, s_active, s_prior) or s_prior < 2 * PMAX:
        return 1
    return 2


def resize_block_len(block_len: int, bs: int, q_head: int, s_active: int, s_prior: int) -> int:
    """Effective block length: the largest divisor of `block_len` that fills whole tiles on each core."""
    if block_len <= 0:
        return block_len
    tile = context_shards(bs, q_head, s_active, s_prior) * PMAX
    bucket = s_prior // block_len * block_len
    return block_len if bucket % tile else math.gcd(block_len, bucket // tile)


def shuffle(mask: torch.Tensor, block_len: int) -> torch.Tensor:
    """Reorder axis 0 from sequence order to the kernel's row order; `block_len` is the effective one."""
    if mask.shape[0] % (PMAX * block_len):
        return mask
    return mask.unflatten(0, (-1, PMAX, block_len)).transpose(1, 2).flatten(0, 2)


def unshuffle(mask: torch.Tensor, block_len: int) -> torch.Tensor:
    """Inverse of `shuffle`."""
    if mask.shape[0] % (PMAX * block_len):
        return mask
    return mask.unflatten(0, (-1, block_len, PMAX)).transpose(1, 2).flatten(0, 2)


def require_context_layout(
    operator: str, block_len: int, bs: int, q_head: int, s_active: int, s_prior: int
) -> None:
    """The context must fill whole tiles of 128 positions on every core.

    Raises:
        AssertionError: it does not, and the simulator is strict. Otherwise the axis stays in sequence order.
    """
    shards = context_shards(bs, q_head, s_active, s_prior)
    rules.require(
        s_prior % (shards * PMAX) == 0,
        operator,
        "context-per-core",
        f"Context per core must be a multiple of {PMAX} (context and cores that divide it)",
        got=(s_prior, shards),
    )
    resized = resize_block_len(block_len, bs, q_head, s_active, s_prior)
    rules.require(
        s_prior % (PMAX * resized) == 0,
        operator,
        "context-tiles",
        f"Context must be a multiple of {PMAX} times the resized block length",
        got=(s_prior, resized),
    )


def visible_positions(pos_ids: torch.Tensor, start_pos: torch.Tensor | None, s_prior: int) -> torch.Tensor:
    """Which context slots each new token sees, in sequence order.

    The last `s_active` slots hold the new tokens themselves; new token j sees new token k when k <= j.

    Args:
        pos_ids: [bs, s_active], number of tokens before each new token.
        start_pos: [bs, s_active], first position inside the sliding window, or None. A start beyond the
            first new token's position means that the window wraps round the context.
        s_prior: length of the context axis, new tokens included.

    Returns:
        bool [s_prior, bs, s_active].
    """
    s_active = pos_ids.shape[1]
    position = torch.arange(s_prior, device=pos_ids.device).view(-1, 1, 1)
    # The same number of prior tokens for all new tokens of a sequence.
    prior = pos_ids.amin(dim=1, keepdim=True)
    visible = position < prior
    if start_pos is None:
        visible = visible.expand(-1, -1, s_active)
    else:
        after_start = position >= start_pos
        visible = torch.where(start_pos > prior, after_start | visible, after_start & visible)
    active = torch.ones(s_active, s_active, dtype=torch.bool, device=pos_ids.device).triu()
    active = active[:, None, :].expand(-1, pos_ids.shape[0], -1)
    return torch.cat([visible[: s_prior - s_active], active])


@rules.operator
def gen_attention_decode_mask(
    pos_ids: torch.Tensor,
    bs: int,
    q_head: int,
    s_active: int,
    s_prior: int,
    start_pos: torch.Tensor | None = None,
    block_len: int = 0,
    local_filled_slots: torch.Tensor | None = None,
    dcp_active_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mask for `attention_decode`.

    Args:
        pos_ids: [1, bs * s_active], position of each new token (= number of tokens before it).
        bs: sequences in the batch.
        q_head: query heads on this rank.
        s_active: new tokens per sequence.
        s_prior: context length = blocks per sequence * block_len; includes the slots of the new tokens.
        start_pos: [1, bs * s_active], first position of each new token's sliding window.
        block_len: tokens per cache block.

    Returns:
        float32 [s_prior, bs, q_head, s_active] of 0 and 1 (1 = attend), axis 0 in the kernel's order.

    Raises:
        ValueError: s_prior is not a multiple of 128.
        NotImplementedError: block_len <= 0 or decode context parallelism.
        AssertionError: s_prior does not fill whole tiles on each core.
    """
    if s_prior % PMAX:
        raise ValueError(f"s_prior must be a multiple of {PMAX}, got {s_prior}")
    if block_len <= 0:
        raise NotImplementedError(f"{OPERATOR}: block_len must be positive, got {block_len}")
    not_supported(OPERATOR, local_filled_slots=local_filled_slots, dcp_active_mask=dcp_active_mask)
    require_context_layout(OPERATOR, block_len, bs, q_head, s_active, s_prior)
    start = None if start_pos is None else start_pos.reshape(bs, s_active)
    visible = visible_positions(pos_ids.reshape(bs, s_active), start, s_prior)
    mask = shuffle(visible, resize_block_len(block_len, bs, q_head, s_active, s_prior))
    return mask.to(torch.float32)[:, :, None, :].expand(-1, -1, q_head, -1).contiguous()
