"""Direct launches of the kernels on a GPU, against launches through Triton's JIT, bit for bit.

The site's kernel is compiled again for other dtypes, alignments and strides. If a direct launch
took a kernel that was compiled for other arguments, results would differ, or the device would
report a misaligned address.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.unit.engine.gate_chunks import twin
from tests.unit.engine.instructions import buffers, chains
from tests.unit.engine.no_gates import no_gates
from verdicts import Lines, Verdict, each, equal

from rheostat_engine.sites import kernels
from rheostat_engine.sites.kernels import launch_site
from rheostat_engine.worker import expand_kernel
from rheostat_engine.worker.expand_kernel import launch_expand
from rheostat_engine.worker.instructions import Instructions, expand_reference
from rheostat_engine.worker.state.buffers import Buffers, SiteBuffers
from rheostat_engine.worker.state.kernel_launcher import KernelLauncher
from rheostat_engine.worker.steering import gate_kernels

WIDTH = 256
SLOTS_PER_TOKEN = 64
"""Dose slots of each token. So no two tokens add to one slot, in an order that changes."""
MODULES = {"site": kernels, "expand": expand_kernel, "fold": gate_kernels}
"""Modules with a launcher, by what they launch."""


class Layout(NamedTuple):
    """Where a tensor lies."""

    offset: int = 0
    """Elements before the first one; the storage is aligned."""
    stride: int = WIDTH
    """Elements from row to row."""

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of values, [T, W], that lies so."""
        tokens, width = values.shape
        size = self.offset + tokens * self.stride
        storage = torch.zeros(size, dtype=values.dtype, device=values.device)
        placed = storage[self.offset :].view(tokens, self.stride)[:, :width]
        return placed.copy_(values)


class Case(NamedTuple):
    """One form of a launch at a site."""

    dtype: torch.dtype = torch.bfloat16
    residual: torch.dtype | None = torch.bfloat16
    h_layout: Layout = Layout()
    residual_layout: Layout = Layout()
    ring_layout: Layout = Layout()
    moved: str = ""
    """A tensor of the site that is misaligned."""
    gain: float = 1.0
    batches: int = 1
    """How many leading dimensions the tokens are cut into."""


MISALIGNED, ODD = Layout(offset=1), Layout(stride=WIDTH + 1)
CASES = {
    **{
        f"{dtype} with a residual of {residual}": Case(dtype, residual)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for residual in dict.fromkeys((None, dtype, torch.float32))
    },
    "h misaligned": Case(h_layout=MISALIGNED),
    "h misaligned without a residual": Case(residual=None, h_layout=MISALIGNED),
    "residual misaligned": Case(residual_layout=Layout(offset=4)),
    "h of an odd stride": Case(h_layout=ODD),
    "residual of an odd stride": Case(residual_layout=ODD),
    "h of another stride": Case(h_layout=Layout(stride=WIDTH + 16)),
    "ring misaligned": Case(ring_layout=MISALIGNED),
    "codes misaligned": Case(moved="code"),
    "doses misaligned": Case(moved="doses"),
    "a gain": Case(residual=None, gain=0.22),
    "two batches": Case(batches=2),
}
LOOKUPS = 17
"""Forms that the JIT looks up. A gain and two batches need no kernel of their own."""


class Bits(NamedTuple):
    """What a launch writes."""

    h: torch.Tensor
    residual: torch.Tensor | None
    ring: torch.Tensor
    doses: torch.Tensor

    def same(self, other: "Bits") -> bool:
        """Whether all bits are equal."""
        pairs = [(one, two) for one, two in zip(self, other, strict=True) if one is not None]
        return all(
            torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))
            for one, two in pairs
            if two is not None
        )


class Subject:
    """A case with its inputs on the device."""

    def __init__(self, case: Case, device: str) -> None:
        """Chains of every kind, each for one token; further tokens add a row, or do nothing."""
        programs = chains()
        codes = [0, *range(-len(programs), 0), 2, 1]
        codes += [0] * (len(codes) % 2)
        captured = [1 + token for token in range(len(codes))]
        made = buffers(WIDTH, dtype=case.dtype, codes=codes, captured=captured, programs=programs)
        site = twin(made, device)
        tokens = len(codes)
        site = site._replace(
            dose_slot=SLOTS_PER_TOKEN * torch.arange(tokens, dtype=torch.int32, device=device),
            doses=torch.zeros(SLOTS_PER_TOKEN * tokens, 4, device=device),
            ring=torch.zeros(tokens + 1, WIDTH, dtype=case.dtype, device=device),
        )
        if case.moved:
            tensor = getattr(site, case.moved)
            placed = MISALIGNED._replace(stride=tensor.numel()).place(tensor.reshape(1, -1))
            site = site._replace(**{case.moved: placed.view(tensor.shape)})
        generator = torch.Generator().manual_seed(3)
        self._case, self._site = case, site
        self._h = torch.randn(tokens, WIDTH, generator=generator).to(device, case.dtype)
        self._residual: torch.Tensor | None = None
        if case.residual is not None:
            noise = torch.randn(tokens, WIDTH, generator=generator)
            self._residual = noise.to(device, case.residual)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor | None, SiteBuffers]:
        """New copies of what a launch changes, and the site."""
        case = self._case
        h, residual = case.h_layout.place(self._h), self._residual
        if residual is not None:
            residual = case.residual_layout.place(residual)
        if case.batches > 1:
            h = h.view(case.batches, -1, WIDTH)
        ring = case.ring_layout.place(self._site.ring)
        return h, residual, self._site._replace(ring=ring)

    def launch(self) -> Bits:
        """Launches the kernel once, on new inputs."""
        h, residual, site = self.inputs()
        site.doses.zero_()
        launch_site(h, residual, site, self._case.gain)
        return Bits(h, residual, site.ring, site.doses.clone())

    def unchanged(self) -> torch.Tensor:
        """h before any launch."""
        return self._h


class Counted:
    """A kernel's JIT that counts its launches."""

    def __init__(self, jit: Any) -> None:
        self.launches = 0
        self._jit = jit

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return self._jit[grid]


@contextmanager
def new_launcher(name: str, *, direct: bool = True) -> Iterator[Counted]:
    """In the `with` block, a kernel has a launcher that has launched nothing yet.

    Args:
        name: of `MODULES`.
        direct: whether it may skip the JIT.
    """
    module = MODULES[name]
    jit = module._LAUNCHER._jit
    launcher = KernelLauncher(jit)
    counted = Counted(jit)
    launcher._jit = counted
    if not direct:
        launcher._direct = False
    with patch.object(module, "_LAUNCHER", launcher):
        yield counted


def check_launches(device: str = "cuda") -> Lines:
    """Every form of a launch, directly and through the JIT; and launches that a graph captures."""
    direct = {name: module._LAUNCHER._direct for name, module in MODULES.items()}
    results: dict[str, Verdict] = {
        f"{name}: launched directly": equal(found, device == "cuda")
        for name, found in direct.items()
    }
    subjects = {name: Subject(case, device) for name, case in CASES.items()}
    with new_launcher("site", direct=False) as jit:
        wanted = {name: subject.launch() for name, subject in subjects.items()}
    results["launches through the JIT"] = equal(jit.launches, len(CASES))
    with new_launcher("site") as jit:
        first = {name: subject.launch() for name, subject in subjects.items()}
        lookups_first = jit.launches
        later = [
            {name: subjects[name].launch() for name in order}
            for order in (CASES, reversed(CASES), sorted(CASES))
        ]
        lookups = jit.launches - lookups_first
        if device == "cuda":
            results |= check_captured(subjects, wanted, jit)
    for name, bits in wanted.items():
        found = [first[name], *(one[name] for one in later)]
        results[f"{name}: direct launches equal the JIT's"] = each(
            [bits.same(one) for one in found]
        )
    changed = [
        not torch.equal(bits.h.view(-1, WIDTH), subjects[name].unchanged())
        for name, bits in wanted.items()
    ]
    results["forms of a launch that change the stream"] = each(changed)
    results["first launches that asked the JIT"] = equal(lookups_first, LOOKUPS)
    results["later launches that asked the JIT"] = equal(lookups, 0)
    return results | check_expand(device)


def check_captured(subjects: dict[str, Subject], wanted: dict[str, Bits], jit: Counted) -> Lines:
    """Direct launches of two forms in one CUDA graph, which is replayed."""
    names = list(CASES)[:2]
    inputs = [subjects[name].inputs() for name in names]
    for _, _, site in inputs:
        site.doses.zero_()
    before = jit.launches
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for h, residual, site in inputs:
            launch_site(h, residual, site)
    captured = [
        torch.equal(one[0], subjects[name].unchanged())
        for one, name in zip(inputs, names, strict=True)
    ]
    graph.replay()
    torch.cuda.synchronize()
    found = [Bits(h, residual, site.ring, site.doses) for h, residual, site in inputs]
    return {
        "launches in a graph that asked the JIT": equal(jit.launches - before, 0),
        "launches in a graph leave h as it was until the replay": equal(captured, [True, True]),
        "launches in a graph equal the JIT's": each(
            [one.same(wanted[name]) for one, name in zip(found, names, strict=True)]
        ),
    }


def check_expand(device: str = "cuda") -> Lines:
    """Instructions of steps of several sizes, with and without captures and token ids."""
    sites, slots, vocabulary, tokens = 5, 9, 50, 256
    generator = torch.Generator().manual_seed(5)

    def some(top: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, top, shape, generator=generator, dtype=torch.int32)

    def step_of(count: int, *, with_ids: bool, with_base: bool) -> Instructions:
        return Instructions(
            packed=torch.stack([some(top, count) for top in (6, 99, 4, 4, 50)]),
            ids=some(vocabulary, count) if with_ids else None,
            bits=some(4, 4, vocabulary).byte(),
            variants=some(6, slots, 2),
            code_of=some(200, sites, slots),
            base=some(2, 3, sites) * some(900, 3, sites) if with_base else None,
            first_row=count,
        )

    steps = [
        step_of(count, with_ids=with_ids, with_base=with_base)
        for count in (1, 16, 17, 200)
        for with_ids, with_base in product([False, True], repeat=2)
    ]
    same: list[bool] = []
    asked: list[int] = []
    with new_launcher("expand") as jit:
        for step in steps * 2:
            wanted, found = (all_buffers(sites, tokens, where) for where in ("cpu", device))
            expand_reference(step, wanted)
            placed = {
                name: one.to(device) for name, one in step._asdict().items() if torch.is_tensor(one)
            }
            launch_expand(step._replace(**placed), found)
            pairs = [
                (wanted.code, found.code),
                (wanted.cap_row, found.cap_row),
                (wanted.dose_slot, found.dose_slot),
            ]
            same.append(all(torch.equal(one, other.cpu()) for one, other in pairs))
            asked.append(jit.launches)
    return {
        "instructions: expanded tables equal the reference's": each(same),
        "instructions: later launches that asked the JIT": equal(
            asked[-1] - asked[len(steps) - 1], 0
        ),
    }


def all_buffers(sites: int, tokens: int, device: str) -> Buffers:
    """Buffers of so many sites, with the smallest tables."""
    zeros = torch.zeros(2, 8, device=device)
    gates = type(no_gates(1))(*(one.to(device) for one in no_gates(tokens)))
    return Buffers(
        tokens=tokens,
        rows=zeros,
        directions=zeros,
        ints=zeros.int(),
        floats=zeros,
        gates=gates,
        doses=torch.zeros(sites, 20, 4, device=device),
        ring=zeros,
    )
