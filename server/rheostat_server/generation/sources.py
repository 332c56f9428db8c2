"""Reports, in receipts and explanations, which rows a Replace puts where."""

from itertools import zip_longest

from rheostat_server.steering.interventions import Intervention
from rheostat_wire.v1 import generation_service_pb2, receipt_pb2


def add_source(
    message: receipt_pb2.AppliedIntervention | generation_service_pb2.ResolvedIntervention,
    intervention: Intervention,
) -> None:
    """Writes the source of a Replace; does nothing for other ops."""
    replacement = intervention.op.replacement
    if replacement is None:
        return
    source = message.source
    source.run_id, source.sha256 = replacement.run_id, replacement.sha256
    for position, of_run in zip_longest(replacement.positions, replacement.source_positions):
        source.rows.add(position=position, source_position=of_run)
