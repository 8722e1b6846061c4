"""Data types of the kernel language; here the types of torch."""

import torch

bfloat16 = torch.bfloat16
float16 = torch.float16
float32 = torch.float32
