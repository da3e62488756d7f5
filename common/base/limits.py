"""Bounds of queues, waits, retries and sizes, and the relations between them. What a message may
hold is bounded by its type, in schemas/.

A queue, a wait, a retry or a size without a limit here does not exist.
"""

from typing import Final

from slackwater.schemas.base import WORKERS_MAX
from slackwater.schemas.cluster import NODES_MAX
from slackwater.schemas.service import BREACHES_MAX

# The bus
MESSAGE_BYTES_MAX: Final = 512 * 1024
"""NATS takes 1 MiB; bulk data never rides on a message."""
REQUEST_TIMEOUT_S: Final = 5.0
REQUEST_ATTEMPT_S: Final = 1.0
"""Seconds after which a request that nobody has answered is sent again, then after twice as long
each time: whoever was asked may have been killed with it."""
REQUEST_SOON_S: Final = 0.25
"""The same after a repetition that found nobody there."""
RETRY_BUDGET_S: Final = 60.0
RETRY_WAIT_S_MIN: Final = 0.05
RETRY_WAIT_S_MAX: Final = 2.0
NOBODY_WAIT_S_MAX: Final = 0.5
"""The same where the bus says that nobody is there: a service that was killed is soon back."""
ENDPOINT_CONCURRENCY: Final = 256
"""Requests that one endpoint works on at once; one more is refused with 503."""
ADMISSIONS_MAX: Final = 1536
"""The same for submissions of jobs, which come in bursts: those in memory whose records are not
durable yet. STEPS_WAITING_MAX is the bound for all verbs together."""
INBOX_EVENTS_MAX: Final = 8192
SUBSCRIPTION_PENDING_MAX: Final = 8192
SUBSCRIPTION_PENDING_BYTES_MAX: Final = 64 * 1024 * 1024
RECONNECT_WAIT_S: Final = 0.1
RELAY_FRAME_HEAD: Final = 4096 + 1024
"""Bytes of a frame to or from the relay of a worker service, without its payload."""
RELAY_GREETINGS_MAX: Final = 1024
"""Connections to it whose processes have not made themselves known; the others are of ranks."""
RELAY_OF_A_RANK_MAX: Final = 16
"""Connections that the processes of one rank may have."""
RELAY_CONNECT_S: Final = 60.0
"""A program waits so long for its worker service, which may be being started again."""
RELAY_GREETING_S: Final = 5.0
RELAY_ASKS_MAX: Final = 16
"""Requests of one connection that are on their way at once."""
RELAY_PER_S: Final = 100.0
"""Frames a second that a rank may send for long; an Agent sends three."""
RELAY_BURST: Final = 400
"""Frames that it may send at once."""
PERMITS_PER_S: Final = 4000.0
"""Frames a second about permits that one connection may send for long: subtasks of half a
millisecond."""
PERMITS_BURST: Final = 4000
"""Frames about permits that it may send at once."""
PERMIT_WAIT_S: Final = 60.0
"""A process whose turn does not come for so long goes on without: its worker service hangs."""
PERMIT_AGAIN_S: Final = 1.0
"""Seconds until a process asks a worker service again that was away."""
RELAY_SEND_S: Final = 5.0
"""A program that does not read its answers for so long loses the connection."""
BUS_CONNECT_S: Final = 3.0
BUS_PING_S: Final = 5.0
"""A silent connection is probed this often; two pings without an answer end it."""
NATS_VERSION_MIN: Final = (2, 11)
"""The first server with a time to live per key: leases need it."""
NATS_START_S: Final = 10.0
BUS_MENDED_LOOKS: Final = 3
"""Looks in a row, a second apart, at which a server that cannot write has a disk that can."""
BUS_STATE_S: Final = 5.0
"""Seconds for which what was heard of a bus server counts."""
STORE_DOUBT_S: Final = 2.0
"""A store that has not answered for so long is said to be away: only reads are answered then."""
NATS_LOG_BYTES_MAX: Final = 16 * 1024 * 1024

# Durable records
STORE_TIMEOUT_S: Final = 2.0
STORE_IN_FLIGHT_MAX: Final = 256
RECORD_BYTES_MAX: Final = 256 * 1024
STORE_READ_MAX: Final = 500
"""Entries asked for at once when a bucket is read, and their bytes: the server closes a connection
with 64 MiB waiting."""
STORE_READ_BYTES_MAX: Final = 4 * 1024 * 1024
STORE_WATCH_S: Final = 2.0
"""A watch asks anew after this long without a change: it survives a server's restart."""
FACTS_LOOK_S: Final = 60.0
"""Seconds between two looks of the leading master at the stream of facts."""
FACTS_RETRY_S: Final = 5.0
"""Seconds between two attempts to make it, or to reach the bus."""
FACTS_SHOWN_MAX: Final = 100_000
"""The most facts that one command reads, the newest."""
TOMBSTONE_S: Final = 60
"""A deleted key is remembered this long, for those who watch with the NATS CLI, then leaves no
trace. Whoever starts reads all of them: with an hour's, at 100 jobs a second, a master needed ten
seconds to begin."""
LEASE_TTL_S_MIN: Final = 1.0

# Services
HEARTBEAT_S: Final = 1.0
LOST_AFTER_S: Final = 6.0
"""No heartbeat for this long: the instance is lost. Longer than a supervised restart takes."""
LEASE_S: Final = 10.0
DRAIN_S: Final = 10.0
LEFT_BEHIND_S: Final = 15.0
"""Seconds to wait for the bus server of a supervisor that was killed."""
UNIT_LOG_BYTES_MAX: Final = 8 * 1024 * 1024
"""The log of a supervised service; one earlier part of the same size is kept."""
WATCHDOG_S: Final = 10.0
RESTART_WAIT_S: Final = 0.2
RESTARTS_MAX: Final = 20
"""Within RESTART_WINDOW_S; one more and the supervisor gives up with the reason."""
RESTART_WINDOW_S: Final = 60.0
RESTART_WAIT_S_MAX: Final = 2.0
SETTLED_S: Final = 2.0
"""A service that was ready for so long and then ends is started anew without a longer wait."""
FIRST_STARTS_MAX: Final = 3
"""A service that ends so often before it ever was ready is not started again."""
OOM_SCORE_JOB: Final = 800
OOM_SCORE_AGGREGATOR: Final = 400
"""Scores by which the kernel chooses its victim when memory runs out: a job's process before an
aggregator, and that before the services by which all jobs live (0)."""
START_S: Final = 60.0
"""From start to READY=1, on a busy machine, kernels compiled."""
ABORT_S: Final = 1.0
"""From SIGABRT (the watchdog's) to SIGKILL."""
FD_STORE_MAX: Final = 8192
NOTIFY_BYTES_MAX: Final = 4096
NOTIFY_FDS_MAX: Final = 253
SOCKET_PATH_MAX: Final = 107

# The service shell
STEPS_WAITING_MAX: Final = 4096
"""Steps whose records are not durable yet; one more request is refused, facts wait."""
REPLY_S: Final = 30.0
"""A core that has not answered a request by then has forgotten it."""
REQUESTS_IN_FLIGHT_MAX: Final = 512
ACTIONS_IN_FLIGHT_MAX: Final = 1024
TIMERS_MAX: Final = 100_000
SENDERS_MAX: Final = 65_536
STORE_RETRY_S: Final = 60.0
"""A bucket that cannot be read back for so long ends its writer, to be started anew."""
EPOCH_ATTEMPTS_MAX: Final = 50
PEERS_S: Final = 0.25
"""Seconds in which peers tell what they remember of a bucket that is taken over."""
REMEMBERED_MAX: Final = 1024
"""Buckets whose newest mark a service remembers."""
CHECK_S: Final = 300.0
"""Seconds between two comparisons of a bucket with what its writer knows of it."""
"""Instances that start at once take turns in writing their epoch."""
BREACHES_KEPT: Final = 16
"""Events from outside that broke a core, of one instance."""
BREACH_BYTES_MAX: Final = 8192
"""Bytes that are kept of each breach to reproduce it."""
BREACH_ERROR_CHARS: Final = 512
BREACH_TERM_S: Final = 600.0
"""Seconds for which a message that broke a core is refused."""
BREACHES_ALIKE_MAX: Final = 3
"""Facts of one type and origin that break a core before all of them are refused."""
BREACH_S: Final = 2.0
"""A service that broke tells so long what it had decided before."""
DAMAGED_FEW: Final = 16
"""Damaged records that a service starts without, however few others there are."""
DAMAGED_SHARE_MAX: Final = 0.1
"""The part of a bucket's records that may be damaged besides: more is another fault."""
COUNTERS_MAX: Final = 192
UNDECODABLE_LOGGED_MAX: Final = 100
SCRAPES_MAX: Final = 16
"""Connections to a service's metrics at once; one more ends the oldest that asks nothing."""
SCRAPE_S: Final = 5.0
SCRAPE_ANSWER_S: Final = 2.0
"""Seconds in which a service's loop must answer a scrape, which fails otherwise."""
STRANGER_LINES_MAX: Final = 10
"""Log lines of one kind about peers that need not be ours, within STRANGER_LINES_S; what is left
out is counted."""
STRANGER_LINES_S: Final = 60.0
NOTIFY_S: Final = 5.0

# Jobs
JOBS_MAX: Final = 10_000
RESULT_BYTES_MAX: Final = 4096
LIST_JOBS_MAX: Final = 500
"""Jobs in one answer; an operator pages on with `offset`."""
LIST_BYTES_MAX: Final = 256 * 1024
"""Whole records in one answer; the rest of the message is for the jobs' progress."""
MODELS_KNOWN_MAX: Final = 256
"""Models whose profiled demand the master remembers."""

# The pool
CLUSTERS_MAX: Final = 256
WINDOW_ITERATIONS_MAX: Final = 4096
"""Iterations after which a profiler reports how fast a job is."""
WORKER_NODES_MAX: Final = 4096
LOCAL_NODES_MAX: Final = 64
"""Worker services of one machine that pose as nodes."""
WORKER_PRUNE_S: Final = 30.0
"""Seconds between two looks at the files of jobs that ended."""
WORKER_ROOM_BYTES: Final = 32 * 1024 * 1024
"""Bytes that must be free on a worker service's disk. With less it starts no job, whose files would
not fit."""
WORKER_ROOM_S: Final = 1.0
LOG_TAIL_BYTES: Final = 8192
"""The end of a rank's log that is searched for the reason of a failure."""
LOG_LINE_CHARS: Final = 1000
LOG_PIECE_BYTES: Final = 128 * 1024
"""A piece of a rank's log in one answer."""
LOG_WAIT_S: Final = 3.0
"""The longest wait of a request for what a rank will print."""
LOG_READERS_MAX: Final = 256
"""The most such requests at one worker service; one more is told when to come again."""
LOG_DRAIN_S: Final = 2.0
"""Seconds to wait, after a rank's end, for what it printed last."""
TERMINAL_S: Final = 2.0
"""Seconds within which the program that keeps a terminal takes what was typed."""
TERMINAL_HERE_S: Final = 10.0
"""Seconds after which a person who types nothing is still told to be there."""
TERMINAL_ALONE_S: Final = 120.0
"""Seconds after which a terminal at which nobody sits hangs up."""

# The Agent library
AGENT_WAIT_S: Final = 120.0
"""Deadline of each wait of a training program, unless it sets its own."""
SNAPSHOTS_MAX: Final = 10_000
"""Attempts to copy parameters between two updates of a job that does not wait for its workers."""
REPEAT_S: Final = 5.0
"""Seconds after which an Agent repeats a request or a doorbell that had no effect yet."""

# The data plane
CHUNK_BYTES: Final = 4 * 1024 * 1024
"""The grain of execution."""
CHUNK_SLOT_S: Final = 0.003
"""Slot time after which a slot in deadline order looks for more urgent work."""
BUCKET_BYTES: Final = 1024 * 1024
"""Neighbouring tensors smaller than this share a bucket, up to this size."""
FRAME_BYTES_MAX: Final = 64 * 1024
CHANNELS_MAX: Final = 4096
CONNECT_S: Final = 5.0
GREETINGS_MAX: Final = 512
"""Connections of one listener that have not said who they are yet. One more, and the peer with the
most of them loses its oldest."""
ADMIT_WAIT_S: Final = 0.2
"""Seconds for which a greeting waits for its job, which is on its way here; the peer has no channel
meanwhile."""
ADMIT_LOOK_S: Final = 0.01
GRANTS_MAX: Final = 65_536
"""Keys of one channel."""
CHANNEL_REQUESTS_MAX: Final = 256
"""Opened keys and handovers of one channel that wait for their answer."""
CHANNEL_REQUEST_S: Final = 5.0
OFFERS_MAX: Final = 64
"""Regions that came on one channel and were not opened yet; the oldest are let go."""
HANDOVERS_MAX: Final = 16
HANDOVER_S: Final = 30.0
PREPARED_S: Final = 30.0
"""Memory that was made for a handover is given back when nothing was written into it for so long.
"""
PREPARED_AHEAD_S: Final = 300.0
"""The same of memory that was asked for before there is anything to write: a bucket that leaves
waits for a gap between two of its job's iterations."""
SEND_QUEUE_FRAMES: Final = 4096
"""Frames that the peer's program has not received yet; one more is refused."""
SEND_QUEUE_BYTES: Final = 8 * 1024 * 1024
PROGRESS_FRAMES: Final = 64
"""A receiver says how far it is after this many frames, or PROGRESS_BYTES."""
PROGRESS_BYTES: Final = 256 * 1024
OUTBOX_ENTRIES_MAX: Final = 32_768
"""Buffers that wait for one socket; more means that the peer asks and never reads."""
COPY_INLINE_BYTES: Final = 1024 * 1024
"""A longer copy runs in a thread, so that the event loop lives."""
TRANSFER_BYTES: Final = 2 * 1024 * 1024
"""The part of a write or read that one record of a data stream carries."""
TRANSFERS_MAX: Final = 1024
"""Parts of one channel that are not acknowledged yet."""
CREDIT_BYTES: Final = 32 * 1024 * 1024
"""Bytes of one channel that are not acknowledged yet."""
STREAMS: Final = 2
"""Data streams of a channel, beside its control stream."""
STREAMS_MAX: Final = 16
LANES_MAX: Final = 128
"""Further data streams of a channel, on which compiled code of the program asks: one for each
client of a device (NBD_CONNECTIONS_MAX)."""
LANE_PAUSE_S: Final = 1.0
"""A connection that lost its lane to a lender does without for so long."""
LANE_WAIT_S: Final = 2.0
"""A lane without any answer for so long is given up; the channel is asked instead."""
SETTLE_S: Final = 0.0001
"""The event loop waits so long in place for the answer to a small transfer."""
SETTLE_BYTES: Final = 256 * 1024
"""In place only while no more than this is under way."""
SETTLES_MAX: Final = 127
"""Transfers that one caller may wait for in place before other tasks have their turn."""
RESUME_S: Final = 5.0
"""A stream that broke must be back within this, or its channel is lost."""
RESUME_EOF_S: Final = 1.0
"""The same where the peer's kernel closed every stream in good order: most likely it died."""
STALL_S: Final = 10.0
"""A record that was begun, or a transfer without any progress, ends the channel after this."""
CLOSE_S: Final = 1.0
VERBS_RING_BYTES: Final = 128 * 1024
"""Control bytes of one queue pair that the peer has not consumed; pinned twice at each side."""
VERBS_MESSAGES: Final = 96
"""The same, in messages; credit takes VERBS_CREDIT_MESSAGES more."""
VERBS_CREDIT_MESSAGES: Final = 32
VERBS_SENDS: Final = 512
"""Work requests of one queue pair that are not completed."""
VERBS_READS: Final = 16
"""RDMA READs of one queue pair that the NIC has under way."""
VERBS_IN_FLIGHT_BYTES: Final = 4 * 1024 * 1024
"""Bytes of one queue pair's writes and reads under way: what a control frame may wait behind."""
VERBS_BLOCK_BYTES: Final = 256 * 1024
"""The part of a write or read that passes through staging memory at once."""
VERBS_STAGING_PAGES: Final = 512
VERBS_STAGING_BYTES: Final = 16 * 1024 * 1024
"""Pinned staging memory of one device, for buffers that do not lie in a registered region."""
VERBS_VERDICT_S: Final = 0.25
"""A refused access may be a peer that is dying: its connection tells within this."""
CPU_SHARE_MIN: Final = 0.03

# Aggregators
BUCKETS_HELD_MAX: Final = 4096
"""Buckets that one aggregator holds: the names of their descriptors come back in one environment
variable, which the kernel bounds to 128 KiB."""
REGION_NAME_MAX: Final = 28
ATTACHED_MAX: Final = 200_000
"""Ranks attached to all buckets of one aggregator."""
COMMANDS_WAITING_MAX: Final = 64
"""Commands about one job that wait until its regions are made."""
PROFILE_EXECUTIONS: Final = 12
"""A task's CPU time is the lower quartile of so many first executions."""
CALIBRATION_EXECUTIONS: Final = 100
"""Executions of a task after which what it takes is compared with its profile."""
TASKS_PER_MESSAGE: Final = 2000
MOVES_AT_ONCE: Final = 8
"""Buckets that one aggregator hands over at a time."""
DEPARTED_MAX: Final = 20_000
DEPARTED_S: Final = 60.0
"""An aggregator remembers this long where a bucket went."""
LINGER_S: Final = 5.0
"""Seconds for which an aggregator keeps the memory of a bucket that left, for workers that still
read the last version there."""
COPIES_S: Final = 60.0
"""Seconds for which an aggregator keeps a copy of a bucket that nobody has it write."""
ARRIVED_S: Final = 10.0
"""Seconds for which heartbeats repeat that all workers have come to a bucket: longer than a
controller waits for it."""

# Remote memory
SLAB_BYTES_DEFAULT: Final = 1024**3
SLAB_BYTES_MIN: Final = 64 * 1024
SLAB_BYTES_MAX: Final = 64 * 1024**3
SLABS_HELD_MAX: Final = 1024
"""Slabs that one lender holds; each has a descriptor in the store."""
LENDER_DEVICES_MAX: Final = 1024
LENDERS_MAX: Final = 4096
"""Lenders that one device knows."""
DEVICE_BYTES_MAX: Final = 16 * 1024**4
DEVICE_SPANS_MAX: Final = 65_536
DISPATCH_PAGES: Final = 16_384
"""Dispatch entries of a device: pages that are not on disk yet, each with its buffer. One write
more waits."""
NBD_REQUEST_BYTES_MAX: Final = 32 * 1024 * 1024
NBD_CONNECTIONS_MAX: Final = 128
"""Clients of a device that are served: `nbd-client -C` opens one connection for each CPU."""
NBD_HANDSHAKES_MAX: Final = 128
"""Clients that have not finished their handshake; beyond that the oldest is cut off."""
NBD_OPTION_BYTES_MAX: Final = 8192
NBD_LANES_MAX: Final = 256
"""Lenders that one connection asks itself; what lies at others goes through the event loop, and the
lane that is used least makes room for one of them now and then."""
RING_STUCK_S: Final = 10.0
"""A write that has not settled for so long is shown as a device that is stuck; and a device that is
told to end waits no longer than this for anything that does not move."""
NBD_OPTIONS_MAX: Final = 64
NBD_HANDSHAKE_S: Final = 10.0
NBD_ITEMS_MAX: Final = 1024
"""Requests of one connection that wait for a disk, a lender or their answer's departure; then it is
not read further. Together they hold no more than NBD_ITEM_BYTES_MAX."""
NBD_ITEM_BYTES_MAX: Final = 128 * 1024 * 1024
AHEAD_PAGES: Final = 2048
"""Prefetched pages of a device that no client has read yet; the oldest make room."""
AHEAD_WINDOW_MAX: Final = 64
"""Requests of a client that are prefetched at once."""
AHEAD_FETCHES: Final = 64
"""Prefetches of a device that are under way at once; further ones are left out."""
CLAIM_RETRY_S: Final = 0.2
PLACEMENT_WAIT_S: Final = 2.0
"""A lender that has not answered a query or a mapping by then is left out of this placement."""
PLACEMENT_PAUSE_S_MAX: Final = 30.0
"""Seconds between two attempts to place a span for which no lender had room, doubled from one
second."""
ARRAY_CACHE_BYTES_MIN: Final = 256 * 1024
ARRAY_WRITING_PAGES: Final = 256
"""Pages of an array that wait to be written back. While it is full, none that was written is taken
out of local memory, and who touches a page waits."""
ARRAY_FETCHES: Final = 32
"""Prefetches of one array that are under way at once; further ones are left out."""
ARRAY_BATCH_PAGES: Final = 64
ARRAY_STORE_S: Final = 30.0
"""Seconds for which a pager tries to read or write a page before it gives up, loudly."""
ARRAY_SILENT_S: Final = 60.0
"""A pager that is silent for so long counts as dead."""
ARRAY_START_S: Final = 120.0
ARRAY_FLUSH_S: Final = 600.0
SPILL_BLOBS_MAX: Final = 65_536
SPILL_SAMPLES_MAX: Final = 4_000_000
"""Prepared samples of a data set that are kept; the others are prepared anew."""
SPILL_BLOB_BYTES_MAX: Final = 1024**3
SPILL_ANSWER_S: Final = 60.0
"""Longer than a device tries to place or read a page before it goes to its file."""
SLAB_MAP_MEMBERS: Final = 1536
"""Slabs that one record, or one message, of a device's slab map names; larger maps have several."""
SPAN_MEMBERS_MAX: Final = 32
"""Slabs that back one span together: copies, or k + r fragments."""
REGENERATION_BYTES_S: Final = 64 * 1024 * 1024
"""Bytes that a device reads each second, at most, to put back redundancy that was lost."""
REGENERATION_PAGES: Final = 64
"""Rebuilt at once, and between two looks at what was written meanwhile."""
REFILL_BYTES_S: Final = 64 * 1024 * 1024
"""Bytes of its backup that a device reads each second, at most, to fill slabs that are new."""
REFILL_PAGES: Final = 64
"""Pages that are refilled at once: the table's mutex is held while they are copied."""

# Traces
TRACE_BYTES_MAX: Final = 2**30
TRACE_JOBS_MAX: Final = 5_000_000
TRACE_SECONDS_MAX: Final = 1e10
"""Some three hundred years: holds Unix times and durations, refuses a slipped unit."""
TRACE_GPUS_MAX: Final = 65_536
TRACE_SEEDS_MAX: Final = 10_000
TRACE_COUNT_MAX: Final = 2**53
"""The whole numbers that a float holds exactly."""
TRACE_TEXT_MAX: Final = 256
TRACE_TEXT_LONG_MAX: Final = 4096

# Scheduling and simulation
REPLACEMENT_WALKS_MAX: Final = 4
"""How often a decision is repeated without the jobs for which no placement was found."""
STARTS_IN_VAIN_MAX: Final = 1000
"""Times that a simulated job is given GPUs without getting further; it can't end then."""
FORECAST_DECISIONS_MAX: Final = 256
"""Decisions that are thought ahead to tell when a waiting job starts."""
PLACEMENT_HISTORY_MAX: Final = 1000
"""Observations of spread jobs that the consolidation threshold is learned from."""
SERVICE_HISTORY_MAX: Final = 10_000
"""Completed jobs' services that a Gittins index is learned from: the newest."""
AUDIT_FINDINGS_MAX: Final = 100
SERIES_BINS: Final = 400
"""Points of a time series in a simulation's report."""

# Performance models
MODEL_WORKERS_MAX: Final = 100_000
"""Workers of one job in the queueing model (one step of the recursion each)."""
MODEL_BLOCKS: Final = 200
"""Cruise divides training data into 200 blocks (section 3.4.6)."""
MODEL_TIME_LIMIT_S: Final = 60.0
"""Seconds that the search for a configuration of different machines may take."""
MODEL_STEP_S_MIN: Final = 1e-12
MODEL_MACHINES_MAX: Final = 100_000
"""Machines that the cost model shares out between workers and servers."""
MODEL_MACHINES_MIP_MAX: Final = 64
"""Different machines in one mixed-integer programme."""
MODEL_BLOCKS_MAX: Final = 4096
"""Blocks of training data in it."""

assert BREACHES_KEPT * (BREACH_BYTES_MAX + 4 * BREACH_ERROR_CHARS + 1024) <= RECORD_BYTES_MAX
assert REQUEST_ATTEMPT_S < REQUEST_TIMEOUT_S < RETRY_BUDGET_S
assert HEARTBEAT_S * 3 <= LOST_AFTER_S <= LEASE_S
assert RECORD_BYTES_MAX <= LIST_BYTES_MAX < MESSAGE_BYTES_MAX
assert RECORD_BYTES_MAX < STORE_READ_BYTES_MAX
assert LEASE_TTL_S_MIN <= LEASE_S
assert ENDPOINT_CONCURRENCY <= ADMISSIONS_MAX <= STEPS_WAITING_MAX // 2
assert RESULT_BYTES_MAX * WORKERS_MAX <= RECORD_BYTES_MAX
assert WORKER_NODES_MAX <= NODES_MAX
assert BREACHES_KEPT <= BREACHES_MAX
assert BUCKET_BYTES <= CHUNK_BYTES
assert PROGRESS_FRAMES * 4 <= SEND_QUEUE_FRAMES
assert PROGRESS_BYTES * 4 <= SEND_QUEUE_BYTES
assert FRAME_BYTES_MAX <= PROGRESS_BYTES
assert TRANSFER_BYTES <= CREDIT_BYTES
assert TRANSFERS_MAX * 4 <= OUTBOX_ENTRIES_MAX
assert VERBS_MESSAGES + VERBS_CREDIT_MESSAGES <= VERBS_SENDS // 2
assert VERBS_STAGING_PAGES * 4096 * 2 <= VERBS_STAGING_BYTES
assert VERBS_BLOCK_BYTES <= TRANSFER_BYTES <= VERBS_IN_FLIGHT_BYTES
assert VERBS_IN_FLIGHT_BYTES * 2 <= VERBS_STAGING_BYTES
assert BUCKETS_HELD_MAX <= FD_STORE_MAX
assert BUCKETS_HELD_MAX * (REGION_NAME_MAX + 1) <= 120 * 1024
assert MOVES_AT_ONCE <= HANDOVERS_MAX
assert LOG_PIECE_BYTES * 2 <= MESSAGE_BYTES_MAX  # A piece is JSON with base64.
assert LOG_WAIT_S < REQUEST_TIMEOUT_S
assert ADMIT_LOOK_S < ADMIT_WAIT_S < CONNECT_S
assert RESUME_EOF_S <= RESUME_S <= STALL_S
assert SLABS_HELD_MAX <= FD_STORE_MAX
assert SLAB_MAP_MEMBERS * 160 <= RECORD_BYTES_MAX
assert SLAB_MAP_MEMBERS >= SPAN_MEMBERS_MAX
assert DISPATCH_PAGES * 4096 >= 2 * NBD_REQUEST_BYTES_MAX
assert ARRAY_BATCH_PAGES <= ARRAY_CACHE_BYTES_MIN // 4096
assert ARRAY_BATCH_PAGES <= ARRAY_WRITING_PAGES <= DISPATCH_PAGES // 2
assert ARRAY_STORE_S < ARRAY_SILENT_S
assert NBD_REQUEST_BYTES_MAX <= NBD_ITEM_BYTES_MAX
