"""Size, speed and error of the encodings of captured rows, on rows of a real model.

Rows pass through the server's encoders and the client's decoder in messages of a mebibyte, on one
core. Speeds are bytes of raw rows per second. They are those of the fastest repeat, because other
processes can only slow a repeat down. Decoding ends at float32. Errors are those of the encoded
numbers; for rp8 these are the numbers of the projection. "rms" is relative to the root mean square
of all numbers, "largest" and "stated" to the largest number of the row.

Compressors are measured too, bytes to bytes, with and without splitting into planes: LZ4, and zstd
if it is installed.

    OPENBLAS_NUM_THREADS=1 rheostat bench encodings --out results
"""

import argparse
import importlib
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import lz4.frame
import numpy as np

from rheostat._capture.encodings import Decoded, read_tensor
from rheostat._capture.projections import projection_matrix
from rheostat_bench.machine import chosen, described, leave
from rheostat_bench.rows import captured
from rheostat_bench.summaries import Figures
from rheostat_server.capture.encodings import Form
from rheostat_server.tensors import FloatType, widened
from rheostat_wire import byte_planes
from rheostat_wire.dtypes import FloatArray, StoredArray
from rheostat_wire.v1 import tensor_pb2

_MESSAGE = 1 << 20
_SEED = 0
_In = TypeVar("_In")
_Out = TypeVar("_Out")


class Arm(NamedTuple):
    """One encoding."""

    name: str
    """What the table calls it."""
    encoding: tensor_pb2.Encoding.ValueType
    """Its number."""
    share: int = 1
    """W / K."""


ARMS = (
    Arm("raw", tensor_pb2.ENCODING_RAW),
    Arm("lz4_planes", tensor_pb2.ENCODING_LZ4_PLANES),
    Arm("full8", tensor_pb2.ENCODING_FULL8),
    Arm("rp8, K = W/4", tensor_pb2.ENCODING_RP8, 4),
    Arm("topk8, K = W/8", tensor_pb2.ENCODING_TOPK8, 8),
)
"""What is measured."""


class Compressor(NamedTuple):
    """A general compressor, bytes to bytes."""

    name: str
    """What the table calls it."""
    compress: Callable[[bytes], bytes]
    """Bytes to fewer."""
    expand: Callable[[bytes], bytes]
    """And back."""


def compressors() -> list[Compressor]:
    """LZ4, and zstd at two levels where it is installed."""
    found = [
        Compressor(
            "lz4", lambda data: bytes(lz4.frame.compress(data, store_size=True)), _lz4_expand
        )
    ]
    if importlib.util.find_spec("zstandard") is not None:
        zstandard = importlib.import_module("zstandard")
        expand = zstandard.ZstdDecompressor().decompress
        found += [
            Compressor(f"zstd -{level}", zstandard.ZstdCompressor(level=level).compress, expand)
            for level in (1, 3)
        ]
    return found


def _lz4_expand(frame: bytes) -> bytes:
    return bytes(lz4.frame.decompress(frame))


def blocks(rows: StoredArray) -> list[StoredArray]:
    """The rows [layers, positions, W] in messages of at most a mebibyte."""
    layers, positions, width = rows.shape
    step = max(1, _MESSAGE // (layers * width * rows.itemsize))
    return [
        np.ascontiguousarray(rows[:, start : start + step]) for start in range(0, positions, step)
    ]


def measure(rows: StoredArray, kind: FloatType, repeats: int) -> Figures:
    """Ratio, megabytes per second both ways and errors of every encoding."""
    width = rows.shape[-1]
    parts = blocks(rows)
    table: Figures = {}
    for arm in ARMS:
        encoder = Form(arm.encoding, kept=width // arm.share, seed=_SEED).encode
        encoded, sent = _timed(partial(encoder, row_type=kind, wanted=kind), parts, repeats)
        decoded, got = _timed(read_tensor, sent, repeats)
        table[arm.name] = {
            "ratio": rows.nbytes / sum(len(tensor.inline) for tensor in sent),
            "encode_mb_s": rows.nbytes / encoded / 1e6,
            "decode_mb_s": rows.nbytes / decoded / 1e6,
            **_errors([widened(part, kind) for part in parts], got),
        }
    return table


def _errors(rows: Sequence[FloatArray], got: Sequence[Decoded]) -> dict[str, float]:
    how = got[0].encoding
    exact = np.concatenate([part.reshape(-1, part.shape[-1]) for part in rows])
    found = np.concatenate([one.values.reshape(-1, one.values.shape[-1]) for one in got])
    if how.exact:
        same = exact.tobytes() == found.tobytes()
        return {"rms_error": 0.0 if same else np.nan, "largest_error": 0.0 if same else np.nan}
    errors: dict[str, float] = {}
    if how.name == "rp8":
        matrix = projection_matrix(how.kept or 0, how.width or 0, how.seed or 0)
        errors["scalar_product_error"] = _scalar_products(exact, found)
        exact = exact @ matrix.T
    off = np.abs(found.astype(np.float64) - exact)
    stated = np.concatenate(
        [one.max_error.reshape(-1) for one in got if one.max_error is not None]
    ).astype(np.float64)
    # Exact products in another order of summation differ in their last places.
    largest = np.abs(exact).max(axis=1)
    return errors | {
        "rms_error": float(np.sqrt((off**2).mean() / (exact.astype(np.float64) ** 2).mean())),
        "largest_error": float((off.max(axis=1) / largest).max()),
        "stated_error": float((stated / largest).max()),
        "largest_to_stated": float((off.max(axis=1) / stated).max()),
    }


def _scalar_products(exact: FloatArray, projected: FloatArray) -> float:
    """Root mean square of what x.y is off by, over |x| |y|, between different rows."""

    def products(rows: FloatArray) -> FloatArray:
        few: FloatArray = rows[:: max(1, len(rows) // 500)]
        return few @ few.T

    before, after = products(exact), products(projected)
    norms = np.sqrt(np.diagonal(before))
    off = (after - before) / (norms[:, None] * norms)
    others = ~np.eye(len(before), dtype=bool)
    return float(np.sqrt((off[others] ** 2).mean()))


def compare(rows: StoredArray, repeats: int) -> Figures:
    """Ratio and megabytes per second of each compressor, on elements as they are and on planes."""
    size = rows.itemsize
    parts = [part.tobytes() for part in blocks(rows)]
    table: Figures = {}
    for compressor in compressors():
        for way in (compressor, _on_planes(compressor, size)):
            encoded, sent = _timed(way.compress, parts, repeats)
            decoded, got = _timed(way.expand, sent, repeats)
            if got != parts:
                raise RuntimeError(f"{way.name} is not exact")
            table[way.name] = {
                "ratio": rows.nbytes / sum(map(len, sent)),
                "encode_mb_s": rows.nbytes / encoded / 1e6,
                "decode_mb_s": rows.nbytes / decoded / 1e6,
            }
    return table


def _on_planes(one: Compressor, size: int) -> Compressor:
    return Compressor(
        f"{one.name}, planes",
        lambda data: one.compress(byte_planes.split_planes(data, size)),
        lambda data: byte_planes.join_planes(one.expand(data), size),
    )


def _timed(
    work: Callable[[_In], _Out], parts: Sequence[_In], repeats: int
) -> tuple[float, list[_Out]]:
    """The fewest seconds for all parts, and what came of them."""
    done = [work(part) for part in parts]
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        for part in parts:
            work(part)
        times.append(time.perf_counter() - begun)
    return min(times), done


def tables(result: Mapping[str, Mapping[str, Figures]]) -> str:
    """The tables of a result in Markdown, as the documentation holds them."""
    lines = ["| | ratio | encode | decode | rms error | largest | stated |", "|" + "---|" * 7]
    for kind, arms in result["encodings"].items():
        for name, row in arms.items():
            errors = [row["rms_error"], row["largest_error"], row.get("stated_error", 0)]
            cells = " | ".join(f"{error:.2%}" if error else "0" for error in errors)
            lines.append(f"| {name}, {kind} | {row['ratio']:.2f} | {_speed(row)} | {cells} |")
    lines += ["", "| | ratio | compress | expand |", "|" + "---|" * 4]
    for kind, arms in result["compressors"].items():
        for name, row in arms.items():
            lines.append(f"| {name}, {kind} | {row['ratio']:.2f} | {_speed(row)} |")
    return "\n".join(lines)


def _speed(row: Mapping[str, float]) -> str:
    return f"{row['encode_mb_s']:,.0f} MB/s | {row['decode_mb_s']:,.0f} MB/s"


def main() -> None:
    """Measures, prints the tables and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help="a folder with weights, or demo")
    parser.add_argument("--out", type=Path, required=True, help="a folder, for encodings.json")
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    encodings: dict[str, Figures] = {}
    compressed: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = chosen(arguments, Path(scratch))
        for kind in (FloatType.BFLOAT16, FloatType.FLOAT32):
            rows, runner = captured(model, scratch, kind.value)
            encodings[kind.value] = measure(rows, kind, arguments.repeats)
            compressed[kind.value] = compare(rows, arguments.repeats)
        result = {
            "benchmark": "encodings",
            **described(model, runner),
            "layers_positions_width": list(rows.shape),
            "repeats": arguments.repeats,
            "encodings": encodings,
            "compressors": compressed,
        }
        (arguments.out / "encodings.json").write_text(json.dumps(result, indent=1))
        print(tables({"encodings": encodings, "compressors": compressed}))
    leave()


if __name__ == "__main__":
    main()
