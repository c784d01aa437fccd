"""Failures that the connector answers with a miss: each is counted, and each kind logged once."""

import logging

from kvass import metrics
from kvass.errors import KvassError

log = logging.getLogger("kvass.vllm")


class Doubts:
    """One of each half, so that what a request does again and again does not fill the log."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def note(self, operation: str, error: Exception) -> None:
        """Count a failure; of what nobody foresaw, the log has the traceback."""
        metrics.errors.labels("vllm", operation).inc()
        if operation not in self._warned:
            self._warned.add(operation)
            log.warning(
                "kvass: %s failed, which is a miss; counted in kvass_errors_total from now on: %s",
                operation,
                error,
                exc_info=not isinstance(error, KvassError | OSError) or None,
            )
