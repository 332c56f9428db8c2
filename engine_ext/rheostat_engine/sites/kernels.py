"""Triton kernels: the site's op, and the expansion of a step's compact instructions.

Invariant: a kernel equals its plain twin (`op.reference`, `expand_reference`) bit for bit; a token
whose two instructions are 0 is neither read nor written.
"""

import torch
import triton
import triton.language as tl

from rheostat_engine.core.program import Program

_BLOCK = 1024
_TOKENS = 128


@triton.jit
def _site_kernel(
    h_ptr,  # [T, W]
    first_ptr,  # [T, W], first carried part
    second_ptr,  # [T, W], second carried part
    add_ptr,  # [T] int32
    cap_ptr,  # [T] int32
    bank_ptr,  # [R, W]
    ring_ptr,  # [N, W]
    h_stride,
    first_stride,
    second_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(add_ptr + token).to(tl.int64)
    target = tl.load(cap_ptr + token).to(tl.int64)
    if (row != 0) | (target != 0):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        h = tl.load(h_ptr + token * h_stride + column, mask=inside)
        if row != 0:
            addend = tl.load(bank_ptr + row * WIDTH + column, mask=inside).to(tl.float32)
            h = (h.to(tl.float32) + addend).to(h_ptr.dtype.element_ty)
            tl.store(h_ptr + token * h_stride + column, h, mask=inside)
        if target != 0:
            stream = h.to(tl.float32)
            if PARTS > 0:
                carried = tl.load(first_ptr + token * first_stride + column, mask=inside)
                carried = carried.to(tl.float32)
                if PARTS > 1:
                    more = tl.load(second_ptr + token * second_stride + column, mask=inside)
                    carried = carried + more.to(tl.float32)
                stream = stream + carried
            stream = stream.to(ring_ptr.dtype.element_ty)
            tl.store(ring_ptr + target * WIDTH + column, stream, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _expand_kernel(
    slot_ptr,  # [T] int32
    block_ptr,  # [T] int32, 0: not captured
    order_ptr,  # [T] int32
    row_of_ptr,  # [S, slots] int32
    base_ptr,  # [B, S] int32, row of the block's first token, 0: not captured there
    add_ptr,  # [S, tokens] int32
    cap_ptr,  # [S, tokens] int32
    count,
    slots,
    sites,
    tokens,
    CAPTURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    site = tl.program_id(1)
    inside = token < count
    slot = tl.load(slot_ptr + token, mask=inside, other=0)
    row = tl.load(row_of_ptr + site * slots + slot, mask=inside, other=0)
    tl.store(add_ptr + site * tokens + token, row, mask=inside)
    target = tl.zeros([BLOCK], tl.int32)
    if CAPTURES:
        block = tl.load(block_ptr + token, mask=inside, other=0)
        order = tl.load(order_ptr + token, mask=inside, other=0)
        wanted = inside & (block > 0)
        base = tl.load(base_ptr + (block - 1) * sites + site, mask=wanted, other=0)
        target = tl.where(base > 0, base + order, 0)
    tl.store(cap_ptr + site * tokens + token, target, mask=inside)


def launch_site(
    h: torch.Tensor,
    carried: list[torch.Tensor],
    add_row: torch.Tensor,
    cap_row: torch.Tensor,
    bank: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    """The site's op on a CUDA device; at most two carried parts."""
    width = h.shape[-1]
    rows = h.view(-1, width)
    parts = [part.view(-1, width) for part in carried]
    first = parts[0] if parts else rows
    second = parts[1] if len(parts) > 1 else first
    _site_kernel[(rows.shape[0], triton.cdiv(width, _BLOCK))](
        rows,
        first,
        second,
        add_row,
        cap_row,
        bank,
        ring,
        rows.stride(0),
        first.stride(0),
        second.stride(0),
        WIDTH=width,
        BLOCK=_BLOCK,
        PARTS=len(parts),
        num_warps=4,
    )


def launch_expand(
    slot: torch.Tensor,  # [T] int32
    block: torch.Tensor,  # [T] int32
    order: torch.Tensor,  # [T] int32
    row_of: torch.Tensor,  # [S, slots] int32
    base: torch.Tensor | None,  # [B, S] int32
    add_row: torch.Tensor,  # [S, tokens] int32
    cap_row: torch.Tensor,  # [S, tokens] int32
) -> None:
    """Writes every site's instructions for the first T tokens; see `expand_reference`."""
    count, (sites, tokens) = slot.shape[0], add_row.shape
    _expand_kernel[(triton.cdiv(count, _TOKENS), sites)](
        slot,
        block,
        order,
        row_of,
        row_of if base is None else base,
        add_row,
        cap_row,
        count,
        row_of.shape[1],
        sites,
        tokens,
        CAPTURES=base is not None,
        BLOCK=_TOKENS,
    )


def warm_up(program: Program, row_of: torch.Tensor) -> None:
    """Compiles every variant of both kernels, so that no request waits for one.

    Args:
        program: whose buffers the kernels will be given; nothing in them says anything yet.
        row_of: [sites, slots], the bank's.
    """
    add_row, cap_row = program.add_row, program.cap_row
    rows = torch.zeros_like(program.bank[:1])
    for carried in ([], [rows], [rows.float()]):
        launch_site(rows, carried, add_row[0], cap_row[0], program.bank, program.ring)
    token = torch.zeros(1, dtype=torch.int32, device=rows.device)
    for base in (None, torch.zeros_like(row_of[:, :1]).T.contiguous()):
        launch_expand(token, token, token, row_of, base, add_row, cap_row)
