"""Decoder blocks of every shape that the probe tells apart, small and without vLLM."""
# mypy: no-warn-return-any
# What a module returns is Any.

from collections.abc import Callable
from types import MethodType

import torch
from torch import nn

from rheostat_engine.plan.points import Point, site_count
from rheostat_engine.sites.block_layout import Block, BlockLayout, Branch, StreamLayout
from rheostat_engine.sites.probe import NOWHERE, PARALLEL
from rheostat_engine.worker.state.buffers import Buffers
from rheostat_engine.worker.steering.programs import FLOATS, INTS

from .no_gates import no_gates

Parts = tuple[torch.Tensor, torch.Tensor]
Output = torch.Tensor | Parts

WIDTH = 16
TOKENS = 8


class Norm(nn.Module):
    """RMS norm; given two parts of the stream it returns their sum too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Output:
        whole = x.float() if residual is None else x.float() + residual.float()
        normed = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-6)
        out = normed.to(x.dtype) * self.weight
        return out if residual is None else (out, whole.to(x.dtype))


class Core(nn.Module):
    """Stands where vLLM has its attention layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0)


class Attention(nn.Module):
    """Projections around the attention layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.core = Core()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.core(self.inner(x)))


class Mlp(nn.Module):
    """Two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 24, bias=False)
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Base(nn.Module):
    """What every block has."""

    given = 1
    """How many tensors the decoder gives it."""
    sums = False
    """Whether what it returns sums to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Norm()
        self.attention = Attention()
        self.second = Norm()
        self.mlp = Mlp()


class Pair(Base):
    """Llama: the sum of branch and stream is formed by the next norm."""

    given = 2
    sums = True

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> Parts:
        if residual is None:
            x, residual = self.first(x), x
        else:
            x, residual = self.first(x, residual)
        x, residual = self.second(self.attention(x), residual)
        return self.mlp(x), residual


class Sandwich(Pair):
    """Gemma: each branch has a norm of its own before it is added."""

    def __init__(self) -> None:
        super().__init__()
        self.after_attention = Norm()
        self.after_mlp = Norm()

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> Parts:
        if residual is None:
            x, residual = self.first(x), x
        else:
            x, residual = self.first(x, residual)
        x, residual = self.second(self.after_attention(self.attention(x)), residual)
        return self.after_mlp(self.mlp(x)), residual


class Single(Base):
    """OPT, Granite: one tensor is the stream."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class PostNorm(Base):
    """OLMo-2: branches are normed, their inputs are the stream itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(self.attention(x))
        return x + self.second(self.mlp(x))


class Parallel(Base):
    """GPT-NeoX: both branches read the stream that enters the block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attention = self.attention(self.first(x))
        return self.mlp(self.second(x)) + attention + x


class SharedNorm(Base):
    """One norm, used before both branches in turn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.first(x))


class Scaled(Base):
    """Granite: branches are multiplied before they are added."""

    gain = 0.22

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x)) * self.gain
        return x + self.mlp(self.second(x)) * self.gain


class MlpFirst(Base):
    """Parallel, the MLP before attention, one norm and one dropout for both."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.first(x)
        mlp = self.dropout(self.mlp(normed))
        return x + mlp + self.dropout(self.attention(normed))


class Dropped(Base):
    """GPT-2: a dropout stands behind each branch and does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Dropout(0.1), nn.Dropout(0.1)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.one(self.attention(self.first(x)))
        return x + self.other(self.mlp(self.second(x)))


class Beside(Single):
    """StableLM: returns the stream and, beside it, something that nobody takes."""

    def forward(self, x: torch.Tensor) -> Parts:  # type: ignore[override]  # a block like no other
        middle = x + self.attention(self.first(x))
        return middle + self.mlp(self.second(middle)), middle


class Ignored(Base):
    """Command-R: is given what the block before returned beside the stream, and ignores it."""

    given = 2

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> Parts:
        normed = self.first(x)
        return x + (self.attention(normed) + self.mlp(normed)), x


class Bigger(Base):
    """Multiplies the stream that leaves it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return 1.5 * (x + self.mlp(self.second(x)))


class Squared(Base):
    """What its modules return is not what is added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x)).square()
        return x + self.mlp(self.second(x)).square()


class Two(Single):
    """Attention adds to the stream through two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.more = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.first(x)
        x = x + self.attention(normed) + self.more(normed)
        return x + self.mlp(self.second(x))


class Moved(Pair):
    """The residual of a pair changes between the norms."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> Parts:
        if residual is None:
            x, residual = self.first(x), x
        else:
            x, residual = self.first(x, residual)
        x, residual = self.second(self.attention(x), 0.5 * residual)
        return self.mlp(x), residual


class Neither(Base):
    """Returns something that is no stream."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x).sum(-1)


KINDS: dict[type[Base], tuple[StreamLayout, str | None, str | None, str | None]] = {
    Pair: (StreamLayout.PAIR, "second", None, None),
    Sandwich: (StreamLayout.PAIR, "second", None, None),
    Single: (StreamLayout.SINGLE, "second", "attention", "mlp"),
    PostNorm: (StreamLayout.SINGLE, "mlp", "first", "second"),
    Dropped: (StreamLayout.SINGLE, "second", "one", "other"),
    Scaled: (StreamLayout.SINGLE, "second", "attention", "mlp"),
    Beside: (StreamLayout.SINGLE, "second", "attention", "mlp"),
    Parallel: (StreamLayout.SINGLE, None, "attention", "mlp"),
    MlpFirst: (StreamLayout.SINGLE, None, "attention", "mlp"),
    Ignored: (StreamLayout.SINGLE, None, "attention", "mlp"),
    SharedNorm: (StreamLayout.SINGLE, None, "attention", "mlp"),
}
"""By kind of block: how the stream is held, and the modules at the points; None: there is none, or
none is needed."""
NO_MID = {
    Parallel: PARALLEL,
    MlpFirst: PARALLEL,
    Ignored: PARALLEL,
    SharedNorm: NOWHERE,
}


def expected(kind: type[Base], layer: Base, gain: float) -> BlockLayout:
    """The form of a block."""
    stream_layout, *names = KINDS[kind]
    mid, attention, mlp = (getattr(layer, name) if name else None for name in names)
    refused = {Point.RESID_MID: NO_MID[kind]} if kind in NO_MID else {}
    return BlockLayout(stream_layout, mid, Branch(attention, gain), Branch(mlp, gain), refused)


class Decoder(nn.Module):
    """Blocks one after the other, `between` applied to what passes from one to the next."""

    def __init__(
        self,
        kind: type[Base],
        layers: int = 3,
        between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([kind() for _ in range(layers)])
        self.last: nn.Module = Norm()
        self.between = between
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Output:
        residual = None
        for number, layer in enumerate(self.layers):
            x = self.between(x) if number else x
            out = layer(x) if self.kind.given == 1 else layer(x, residual)
            x, residual = out if isinstance(out, tuple) else (out, None)
        return self.last(x, residual) if self.kind.sums else self.last(x)

    def blocks(self) -> list[Block]:
        """As `find_blocks` gives them."""
        return [
            Block(i, base, tuple(one for one in base.modules() if isinstance(one, Core)))
            for i, base in enumerate(self.bases())
        ]

    def bases(self) -> list[Base]:
        """The blocks as modules."""
        return [layer for layer in self.layers if isinstance(layer, Base)]


def stream(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Something that enters the first block, always the same."""
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(7)).to(dtype)


def give_own_forward(module: nn.Module) -> None:
    """Sets the module's forward on the instance alone, as some of vLLM's layers do."""
    module.forward = MethodType(type(module).forward, module)


def buffers(
    layers: int, *, rows: int = 4, ring: int = 64, dtype: torch.dtype = torch.float32
) -> Buffers:
    """Buffers for a decoder; row r of what is added holds r everywhere."""
    return Buffers(
        tokens=TOKENS,
        rows=torch.arange(rows).to(dtype)[:, None].repeat(1, WIDTH),
        directions=torch.zeros(2, WIDTH),
        ints=torch.zeros(3, INTS, dtype=torch.int32),
        floats=torch.zeros(3, FLOATS),
        gates=no_gates(TOKENS),
        doses=torch.zeros(site_count(layers), 70, 4),
        ring=torch.zeros(ring, WIDTH, dtype=dtype),
    )
