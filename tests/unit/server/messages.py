"""Short names for requests and their parts."""

from collections.abc import Sequence

import numpy as np

from rheostat_wire.v1 import (
    capture_pb2,
    gate_pb2,
    generation_pb2,
    generation_service_pb2,
    selector_pb2,
    steering_pb2,
    tensor_pb2,
    types_pb2,
    vector_pb2,
)

from .fakes import WIDTH


def site_set(*points: int, layers: Sequence[int] | None = None) -> types_pb2.SiteSet:
    if layers is None:
        return types_pb2.SiteSet(points=points, all=types_pb2.AllLayers())
    return types_pb2.SiteSet(points=points, list=types_pb2.LayerList(layers=layers))


def tensor(values: np.ndarray, **fields: object) -> vector_pb2.VectorRef:
    message = tensor_pb2.Tensor(
        dtype=tensor_pb2.DTYPE_FLOAT32,
        shape=values.shape,
        encoding=tensor_pb2.ENCODING_RAW,
        inline=values.astype("<f4").tobytes(),
    )
    message.MergeFrom(tensor_pb2.Tensor(**fields))
    return vector_pb2.VectorRef(inline=message)


ONES = np.ones((1, WIDTH), dtype=np.float32)
FIRST, SECOND, THIRD, FOURTH = (
    np.eye(WIDTH, dtype=np.float32)[index : index + 1] for index in range(WIDTH)
)
"""Unit vectors, [1, WIDTH] each."""


def along(*directions: vector_pb2.VectorRef) -> capture_pb2.Projection:
    """What rows are projected on."""
    readouts = [vector_pb2.Readout(vector=one) for one in directions]
    return capture_pb2.Projection(readouts=capture_pb2.ReadoutList(readouts=readouts))


def at_post1(**fields: object) -> steering_pb2.Intervention:
    """An intervention at resid_post 1 unless `fields` say otherwise."""
    fields.setdefault("sites", site_set(types_pb2.POINT_RESID_POST, layers=[1]))
    return steering_pb2.Intervention(**fields)


def coordinate(direction: vector_pb2.VectorRef | None = None) -> vector_pb2.Readout:
    """The coordinate along a direction."""
    return vector_pb2.Readout(vector=direction or tensor(ONES), normalise=vector_pb2.NORMALISE_UNIT)


def norm_add(
    vector: vector_pb2.VectorRef | None = None, scale: float | None = None, **fields: object
) -> steering_pb2.Intervention:
    op = steering_pb2.NormAdd(vector=vector or tensor(ONES), scale=scale)
    return at_post1(norm_add=op, **fields)


def ablate(
    *directions: vector_pb2.VectorRef, strength: float | None = None, **fields: object
) -> steering_pb2.Intervention:
    return at_post1(ablate=steering_pb2.Ablate(directions=directions, strength=strength), **fields)


def band(
    direction: vector_pb2.VectorRef | None = None, low: float | None = None, **fields: object
) -> steering_pb2.Band:
    return steering_pb2.Band(read=coordinate(direction), min=low, **fields)


def clamp(*bands: steering_pb2.Band, **fields: object) -> steering_pb2.Intervention:
    return at_post1(clamp=steering_pb2.Clamp(bands=bands), **fields)


def scaled(
    factor: float | None = None,
    direction: vector_pb2.VectorRef | None = None,
    **fields: object,
) -> steering_pb2.Intervention:
    op = steering_pb2.Scale(read=coordinate(direction), factor=factor)
    return at_post1(scale=op, **fields)


def add(
    vector: vector_pb2.VectorRef | None = None,
    *,
    sites: types_pb2.SiteSet | None = None,
    scale: float | None = None,
    where: selector_pb2.Selector | None = None,
) -> steering_pb2.Intervention:
    return steering_pb2.Intervention(
        sites=sites or site_set(types_pb2.POINT_RESID_POST, layers=[1]),
        where=where,
        add=steering_pb2.Add(vector=vector or tensor(ONES), scale=scale),
    )


def probe(
    name: str = "mood",
    direction: vector_pb2.VectorRef | None = None,
    *,
    sites: types_pb2.SiteSet | None = None,
    where: selector_pb2.Selector | None = None,
    rows: gate_pb2.ProbeRows.ValueType | None = None,
    **read: object,
) -> gate_pb2.Probe:
    """A probe at resid_post 0 unless the arguments say otherwise; `read` is of its readout."""
    return gate_pb2.Probe(
        name=name,
        sites=sites or site_set(types_pb2.POINT_RESID_POST, layers=[0]),
        read=vector_pb2.Readout(vector=direction or tensor(FIRST), **read),
        where=where,
        rows=rows,
    )


def above(number: float, name: str = "mood", **fields: object) -> gate_pb2.Condition:
    return gate_pb2.Condition(probe_name=name, above=number, **fields)


def capture(sites: types_pb2.SiteSet | None = None, **fields: object) -> capture_pb2.CaptureSpec:
    fields = {"inline": capture_pb2.InlineTarget(), **fields}
    return capture_pb2.CaptureSpec(
        sites=sites or site_set(types_pb2.POINT_RESID_POST, layers=[0]), **fields
    )


def request(**fields: object) -> generation_service_pb2.GenerateRequest:
    """Three prompt tokens, two generated ones, unless `fields` say otherwise."""
    if not {"text", "token_ids", "chat"} & fields.keys():
        fields["token_ids"] = types_pb2.TokenIds(ids=[10, 11, 12])
    fields.setdefault("sampling", generation_pb2.Sampling(max_tokens=2))
    interventions = fields.pop("steer", None)
    if interventions is not None:
        fields["steering"] = steering_pb2.Steering(interventions=interventions)
    return generation_service_pb2.GenerateRequest(**fields)


def selector(*include: selector_pb2.Range, exclude: Sequence[selector_pb2.Range] = ()):
    return selector_pb2.Selector(include=include, exclude=exclude)


def window(start: int | None = None, end: int | None = None) -> selector_pb2.Range:
    return selector_pb2.Range(positions=selector_pb2.Window(start=start, end=end))


def generated(start: int | None = None, end: int | None = None) -> selector_pb2.Range:
    return selector_pb2.Range(generated=selector_pb2.GeneratedWindow(start=start, end=end))


PROMPT = selector_pb2.Range(phase=types_pb2.PHASE_PROMPT)
GENERATED = selector_pb2.Range(phase=types_pb2.PHASE_GENERATED)


def token_range(*ids: int) -> selector_pb2.Range:
    return selector_pb2.Range(token_ids=types_pb2.TokenIds(ids=ids))


def span(text: str, occurrence: int | None = None) -> selector_pb2.Range:
    return selector_pb2.Range(text=selector_pb2.Span(text=text, occurrence=occurrence))
