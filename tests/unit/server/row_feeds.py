"""Rows of a request, as the engine delivers them."""

import numpy as np

from rheostat_engine import Point, Rows, Site
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.items import SequenceKey
from rheostat_server.selectors.selection import EVERYTHING
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import capture_pb2

SITE = Site(Point.RESID_POST, 0)
CAPTURE = ResolvedCapture((SITE,), EVERYTHING, FloatType.FLOAT32)
KEY = SequenceKey(0, False)
WIDTH = 1024
ROW = 4 * WIDTH
FAIL, NEWEST, OLDEST = (
    capture_pb2.OVERLOAD_FAIL,
    capture_pb2.OVERLOAD_DROP_NEWEST,
    capture_pb2.OVERLOAD_DROP_OLDEST,
)


def rows(start: int, end: int) -> Rows:
    positions = np.arange(start, end, dtype=np.int32)
    return Rows("r", (SITE.index,), positions, np.ones((1, end - start, WIDTH), np.float32))
