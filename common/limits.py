"""Every bound of the system in one file, and the relations between them.

A queue, a wait, a retry or a size without a limit here does not exist.
"""

from typing import Final

# The bus
MESSAGE_BYTES_MAX: Final = 512 * 1024
"""NATS takes 1 MiB; bulk data never rides on a message."""
NESTING_MAX: Final = 32
REQUEST_TIMEOUT_S: Final = 5.0
RETRY_BUDGET_S: Final = 60.0
RETRY_WAIT_S_MIN: Final = 0.05
RETRY_WAIT_S_MAX: Final = 2.0
ENDPOINT_CONCURRENCY: Final = 256
"""Requests that one endpoint works on at once; one more is refused with 503."""
INBOX_EVENTS_MAX: Final = 8192
SUBSCRIPTION_PENDING_MAX: Final = 8192
RECONNECT_WAIT_S: Final = 0.1

# Durable records
STORE_TIMEOUT_S: Final = 5.0
STORE_IN_FLIGHT_MAX: Final = 256
RECORD_BYTES_MAX: Final = 256 * 1024

# Services
HEARTBEAT_S: Final = 1.0
LOST_AFTER_S: Final = 6.0
"""No heartbeat for this long: the instance is lost. Longer than a supervised restart takes."""
LEASE_S: Final = 10.0
DRAIN_S: Final = 10.0
WATCHDOG_S: Final = 10.0
RESTART_WAIT_S: Final = 0.2
RESTARTS_MAX: Final = 20
"""Within RESTART_WINDOW_S; one more and the supervisor gives up with the reason."""
RESTART_WINDOW_S: Final = 60.0

# Jobs
JOBS_MAX: Final = 10_000
WORKERS_MAX: Final = 64
RESULT_BYTES_MAX: Final = 4096
TENSORS_MAX: Final = 20_000

# The data plane
CHUNK_BYTES: Final = 4 * 1024 * 1024
"""The grain of execution."""
BUCKET_BYTES: Final = 1024 * 1024
"""Neighbouring tensors smaller than this share a bucket, up to this size."""
FRAME_BYTES_MAX: Final = 64 * 1024
CHANNELS_MAX: Final = 4096
CONNECT_S: Final = 5.0
CPU_SHARE_MIN: Final = 0.03

assert REQUEST_TIMEOUT_S < RETRY_BUDGET_S
assert HEARTBEAT_S * 3 <= LOST_AFTER_S <= LEASE_S
assert RECORD_BYTES_MAX <= MESSAGE_BYTES_MAX
assert RESULT_BYTES_MAX * WORKERS_MAX <= RECORD_BYTES_MAX
assert BUCKET_BYTES <= CHUNK_BYTES
