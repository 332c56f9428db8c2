"""The Triton kernel that expands a step's compact instructions.

Invariant: it equals `expand_reference` bit for bit.
"""

import triton
import triton.language as tl

from rheostat_engine.worker.instructions import Instructions
from rheostat_engine.worker.state.buffers import Buffers
from rheostat_engine.worker.state.kernel_launcher import KernelLauncher

_TOKENS = 128


@triton.jit(do_not_specialize=["count", "first_row"])
def _expand_kernel(
    packed_ptr,  # [5, count] int32: slot, dose slot, rule, block (0: not captured), order
    ids_ptr,  # [T] int32
    bits_ptr,  # [rules, vocabulary] uint8
    variants_ptr,  # [variants, 2] int32
    code_of_ptr,  # [S, slots] int32
    base_ptr,  # [B, S] int32, 1 + the block's first row after first_row, 0: not captured there
    code_ptr,  # [S, tokens] int32
    cap_ptr,  # [S, tokens] int32
    dose_slot_ptr,  # [tokens] int32
    count,
    first_row,
    vocabulary,
    slots,
    sites,
    tokens,
    RULES: tl.constexpr,
    CAPTURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    site = tl.program_id(1)
    inside = token < count
    slot = tl.load(packed_ptr + token, mask=inside, other=0)
    dose_slot = tl.load(packed_ptr + count + token, mask=inside, other=0)
    if RULES:
        rule = tl.load(packed_ptr + 2 * count + token, mask=inside, other=0)
        ruled = inside & (rule > 0)
        name = tl.load(ids_ptr + token, mask=ruled, other=0).to(tl.int64)
        bits = tl.load(bits_ptr + rule.to(tl.int64) * vocabulary + name, mask=ruled, other=0)
        variant = slot + bits.to(tl.int32)
        slot = tl.where(ruled, tl.load(variants_ptr + variant * 2, mask=ruled, other=0), slot)
        dose_slot = tl.where(
            ruled, tl.load(variants_ptr + variant * 2 + 1, mask=ruled, other=0), dose_slot
        )
    code = tl.load(code_of_ptr + site * slots + slot, mask=inside, other=0)
    tl.store(code_ptr + site * tokens + token, code, mask=inside)
    if site == 0:
        tl.store(dose_slot_ptr + token, dose_slot, mask=inside)
    target = tl.zeros([BLOCK], tl.int32)
    if CAPTURES:
        block = tl.load(packed_ptr + 3 * count + token, mask=inside, other=0)
        order = tl.load(packed_ptr + 4 * count + token, mask=inside, other=0)
        wanted = inside & (block > 0)
        base = tl.load(base_ptr + (block - 1) * sites + site, mask=wanted, other=0)
        target = tl.where(base > 0, first_row + base - 1 + order, 0)
    tl.store(cap_ptr + site * tokens + token, target, mask=inside)


_LAUNCHER = KernelLauncher(_expand_kernel)


def launch_expand(step: Instructions, buffers: Buffers) -> None:
    """Writes every site's instructions for the step's tokens; see `expand_reference`."""
    count, (sites, tokens) = step.packed.shape[1], buffers.code.shape
    _LAUNCHER.launch(
        (triton.cdiv(count, _TOKENS), sites, 1),
        (
            step.packed,
            step.packed if step.ids is None else step.ids,
            step.bits,
            step.variants,
            step.code_of,
            step.code_of if step.base is None else step.base,
            buffers.code,
            buffers.cap_row,
            buffers.dose_slot,
        ),
        varying=(count, step.first_row),
        integers=(step.bits.shape[1], step.code_of.shape[1], sites, tokens),
        constants=(step.ids is not None, step.base is not None, _TOKENS),
    )
