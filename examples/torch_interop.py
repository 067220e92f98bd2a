"""cupyflash as a differentiable PyTorch function, on CPU or CUDA tensors, which are shared and not copied.

python examples/torch_interop.py
"""

import torch

import cupyflash


class Attention(torch.autograd.Function):
    """softmax(q k^T / sqrt(D)) v of (batch, sequence, heads, head_dim) tensors."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        out, lse = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        return *cupyflash.attention_backward(dout, q, k, v, out, lse, causal=ctx.causal), None


def largest_differences(device="cpu", dtype=torch.float32):
    """How far out, dq, dk and dv are from torch's own attention."""
    torch.manual_seed(0)
    leaves = [torch.randn(2, 300, 4, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    dout = torch.randn(2, 300, 4, 64, device=device, dtype=dtype)

    out = Attention.apply(*leaves, True)
    ours = out, *torch.autograd.grad(out, leaves, dout)

    q, k, v = (x.transpose(1, 2) for x in leaves)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    theirs = out, *torch.autograd.grad(out, leaves, dout)
    return [(a - b).detach().abs().max().item() for a, b in zip(ours, theirs, strict=True)]


if __name__ == "__main__":
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    print(f"{device}, {dtype}: largest differences from torch's attention")
    for name, difference in zip(("out", "dq", "dk", "dv"), largest_differences(device, dtype), strict=True):
        print(f"  {name:4} {difference:.1e}")
