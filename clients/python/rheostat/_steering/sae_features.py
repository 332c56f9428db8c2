"""Features of sparse autoencoders: read with the encoder, written along the decoder."""

from __future__ import annotations

from dataclasses import dataclass

from rheostat._errors import invalid
from rheostat._selectors import SelectorLike
from rheostat._steering.gates import Probe, probe
from rheostat._steering.interventions import Band, Clamp, Scale
from rheostat._steering.readouts import Readout
from rheostat._steering.vectors import Vector


@dataclass(frozen=True)
class SaeFeature:
    """A feature f of a sparse autoencoder; made by `load_sae_feature`.

    Its activation at a row x is act(x.e + b), with e the encoder's column, b its bias, less what
    the SAE subtracts from x, and act a ReLU or JumpReLU.
    """

    read: Readout
    """Reads the activation."""
    write: Vector
    """The decoder's row, which the feature adds to the stream once per unit of its activation."""

    def clamp(
        self,
        value: float | None = None,
        *,
        min: float | None = None,
        max: float | None = None,
        strength: float = 1.0,
        only_on: bool = False,
    ) -> Clamp:
        """Changes the stream by what the decoder writes if the feature had another activation.

        x + strength * (c - a) * d, with a the activation, d the decoder's row, and c the
        ``value``, or the activation clipped to ``min`` and ``max``. The rest of the stream, which
        the SAE does not reconstruct, stays. With ``only_on`` rows at which the feature is off stay
        as they are.
        """
        if value is not None:
            if min is not None or max is not None:
                raise invalid("clamp", "give a value, or min and max")
            min = max = value
        return Clamp((Band(self.read, min, max, strength, self.write, only_on),))

    def scale(self, factor: float) -> Scale:
        """Multiplies the activation: x + (factor - 1) * a * d."""
        return Scale(self.read, factor, self.write)

    def probe(self, *, where: SelectorLike = None, name: str | None = None) -> Probe:
        """A probe of the activation, for gates."""
        settings = self.read.settings
        return probe(
            self.read.vector,
            where=where,
            bias=settings.bias,
            activation=settings.activation,
            theta=settings.theta,
            name=name,
        )
