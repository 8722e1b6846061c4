import torch
from torch import nn


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class NovaRotaryEmbedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.theta = config.rope_parameters["rope_theta"]
        self.register_buffer("k_scale", None, persistent=False)

    def forward(self, positions: torch.Tensor, dtype):
        steps = torch.arange(0, self.head_dim, 2, device=positions.device).float()
        angles = positions.float()[:, None] / self.theta ** (steps / self.head_dim)
        emb = torch.cat((angles, angles), dim=-1)
        return emb.cos().to(dtype), emb.sin().to(dtype)
