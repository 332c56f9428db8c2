"""Admission: a request as it came becomes an `AdmittedRequest`."""
