"""Limits that are the same for every server. `GetModel` reports them."""

MIB = 1 << 20

CONTROL_MESSAGE_BYTES = 4 * MIB
"""Largest request of EngineService, in bytes."""

TENSOR_MESSAGE_BYTES = 16 * MIB
"""Largest request of the other services, in bytes. gRPC itself refuses larger requests."""

REQUESTS_BYTES = 256 * MIB
"""Bytes of all requests larger than `OFFLOAD_BYTES`, while their calls run."""

CONTROL_RPCS = 64
"""Concurrent calls of EngineService. The flag `--maximum-concurrent-rpcs` limits other calls."""

FIRST_MESSAGE_SECONDS = 30.0
"""Seconds from the start of a call until its first message must be complete."""

FIRST_READS = 32
"""Calls whose first message is read at a time. gRPC keeps up to 512 MiB of these messages."""

CONNECTION_READS = 2
"""Calls of one connection whose first message is read at a time. gRPC copies a message on the event
loop: 2 MiB take up to 5 ms. Messages of one connection often arrive together, and all of them are
then copied in one iteration."""

LOOKAHEAD_BYTES = 256 << 10
"""Bytes that gRPC receives of a call ahead of the server's reads."""

FIRST_READ_SECONDS = 2.0
"""Seconds within which a first message must be complete while other calls wait to be read."""

STATUS_SECONDS = 10.0
"""Seconds that a failed call waits for its client to read the status. It counts as running until
then."""

UPLOAD_GRACE_SECONDS = 10.0
"""Seconds at the start of an upload that do not count for `UPLOAD_BYTES_PER_SECOND`."""

UPLOAD_BYTES_PER_SECOND = 256 << 10
"""Slowest average speed of an upload. A slower upload would keep room that other uploads need."""

VECTOR_BYTES = 64 * MIB
"""Largest vector in an upload."""

UPLOADED_BYTES = 512 * MIB
"""Most bytes of vectors in all unfinished uploads."""

REPLACED_ROWS = 16_384
"""Most rows that one Replace puts in, each for a site and a position."""

RUN_RANGES = 65_536
"""Most ranges of positions in a message of an upload of a run."""

RUN_TOKENS = 1 << 20
"""Most tokens in the header of an upload of a run, which lists one for each position."""

INLINE_VECTOR_BYTES = 8 * MIB
"""Largest vector inside a request."""

CHUNK_BYTES = MIB
"""Size at which tensors are cut for streaming."""

SHARED_CHUNK_BYTES = 12 * MIB
"""Size at which raw rows are cut for shared memory, where a message costs more than its bytes.
It is below the largest message, because a message carries the rows if shared memory is full."""

BATCH_BYTES = 4 * MIB
"""Approximate bytes of a subscription's rows in one message. A message costs a front end and its
client as much as 100 KiB of rows."""

BATCH_EVENTS = 1024
"""Most events of a subscription that travel in one message."""

SHARED_BYTES = 16 << 10
"""Payloads of at least this size go through shared memory if the subscription uses it."""

OFFLOAD_BYTES = 64 << 10
"""Work on more bytes runs on a thread, not on the event loop."""

LARGE_MESSAGE_BYTES = 2 << 20
"""Messages of more bytes are decoded in turns, because the event loop decodes them and every stream
waits. A chunk of an upload is smaller."""

MESSAGE_FIELDS = 1 << 19
"""Most fields of a message, at all depths together. Packed numbers are one field. For comparison,
16 captures with 4096 named readouts each have 200,000 fields."""

MESSAGE_NUMBERS = 1 << 21
"""Most packed numbers of a message, at all depths together. The event loop decodes them. For
comparison, the header of a run has at most twice `RUN_TOKENS`."""

NUMBER_BYTES = 4
"""Memory of a packed number of a decoded message, which may be one byte of the message."""

FIELD_BYTES = 64
"""Approximate memory of a field of a decoded message, without the field's bytes."""

LARGE_REQUEST_BYTES = 16 << 10
"""Requests of more bytes are large; see `LARGE_REQUESTS`."""

LARGE_REQUESTS = 2
"""Large requests that are checked or explained at a time. The others wait in turn, so that not all
results reach the event loop in one iteration."""

COMPILED_REQUESTS = 256
"""Compiled requests that are kept for requests with the same steering and captures."""

COMPILED_REQUEST_BYTES = 64 << 10
"""Requests with more bytes of steering and captures are compiled anew each time. An inline float32
vector of 4,096 elements takes 16 KiB."""

COMPILED_INLINE_BYTES = 64 << 10
"""Requests with more bytes of inline vectors are compiled anew each time."""

COMPILED_PLAN_COST = 1024
"""Requests whose plan costs more are compiled anew each time; see `MAX_PLAN_COST`."""

PAGE_ENTRIES = 1000
"""Most entries of a page of a listing."""

PAGE_BYTES = 1 << 20
"""Approximate size at which a page of a listing ends, even if it has fewer entries."""

VECTOR_ROWS = 1024
"""Most rows of a vector."""

INTERVENTIONS = 256
"""Most interventions of a request."""

DIRECTIONS = 8
"""Most directions of an op."""

RULES = 16
"""Rules of a request."""

HOLD_BACK = 1024
"""Tokens of a sample that a request may hold back."""

GATE_TOKENS = 1 << 20
"""Most tokens for which a gate stays open, or for which a condition must hold."""

PROJECTIONS = 4096
"""Most directions that the rows of a capture are projected on."""

SWEEP_PAIRS = 256
"""Most pairs of a sweep."""

SWEEP_COLUMNS = 4096
"""Most columns of a sweep."""

SWEEP_CELLS = 65_536
"""Most cells of a sweep."""

SWEEP_VALUES = 1 << 18
"""Most grades of all cells of a sweep together, which its summary lists."""

SWEEP_TOKENS = 1 << 20
"""Most tokens of all prompts of a sweep together."""

SWEEP_ROWS = 32_768
"""Most rows that noise and steering put into all prompts of a sweep together. They are kept while
the sweep runs. So many rows of 4,096 elements take 512 MiB."""

SWEEP_POSITIONS = 1 << 18
"""Most positions of all columns of a sweep, in all pairs together."""

SWEEP_RANGES = 1 << 14
"""Most ranges of all selectors of a sweep."""

SWEEP_REQUESTS = 1 << 22
"""Most samples that the cells of a sweep run. Cells may share a request, but not a sample."""

SWEEPS = 8
"""Sweeps that run at a time."""

NOISES = 64
"""Most noises over which a cell is averaged."""

BASELINES = 64
"""Most baselines of a pair."""

GRADES = 8
"""Most grades of a sweep."""

ANSWER_ALTERNATIVES = 64
"""Most alternatives of an answer."""

ANSWER_TOKENS = 16
"""Most tokens of an alternative."""

ZOOM_PEAKS = 16
"""Most peaks around which a grid is refined."""

DONE_RUNS = 4096
"""Most runs of cells that a client says it has."""

CAPTURES = 16
"""Most captures of a request."""

RANGES = 1024
"""Most includes, and most excludes, of a selector."""

REQUEST_RANGES = 4096
"""Most ranges of all selectors of a request."""

RANGE_TOKEN_IDS = 4096
"""Most token ids of one range."""

SPAN_BYTES = 4096
"""Longest text of a span."""

POINTS = 6
"""Most points of a site set: each point once."""

LAYERS = 1024
"""Most layers of a list."""

RUN_SITES = POINTS * LAYERS
"""Most sites in a message of an upload of a run."""

SAMPLES = 64
"""Largest `Sampling.n`."""

STOP_TEXTS = 16
"""Most stop texts."""

STOP_TEXT_BYTES = 256
"""Longest stop text, in bytes of UTF-8. The engine gets a copy for each sample."""

STOP_TOKEN_IDS = 128
"""Most stop tokens."""

SAMPLED_PROMPT_TOKENS = 1 << 20
"""Most prompt tokens times samples of one request, because the engine gets the prompt once for each
sample. A single sample may always fill the context."""

QUEUED_PROMPT_TOKENS = 1 << 24
"""Most prompt tokens times samples of all requests that run or wait: about 1 GiB in the server and
the engine."""

PROMPT_LOGPROBS = 1 << 17
"""Most log-probabilities of a prompt: its tokens, times `prompt_logprobs` plus one. A request may
always ask for the log-probabilities of the prompt's own tokens."""

CHAT_MESSAGES = 1024
"""Most messages of a chat."""

PROMPT_TOKEN_BYTES = 16
"""Most bytes of text for each token of the context length. A longer text is not tokenised."""

SHORT_TEXT_BYTES = 16 << 10
"""Texts up to this size have a tokenizer thread of their own: each takes about 15 ms at most."""

SHORT_TEXTS_WAITING = 2048
"""Short texts that may wait to be tokenised."""

LONG_TEXTS_WAITING = 64
"""Longer texts that may wait to be tokenised."""

DECODED_TOKEN_BYTES = 16
"""Bytes that each waiting token to decode counts for."""

SPAN_SEARCH = 1 << 28
"""Most characters that a request's text spans may search. Each span searches the prompt once."""

TEMPLATE_VARIABLES = 32
"""Most variables given to a chat template."""

TEMPLATE_VARIABLE_BYTES = 64 << 10
"""Most bytes of the names and values of all variables of a chat template."""

LABELS = 16
"""Most labels of a request."""

LABEL_KEY_BYTES = 63
"""Longest key of a label, in bytes of UTF-8."""

LABEL_VALUE_BYTES = 255
"""Longest value of a label, in bytes of UTF-8."""

PAGE_TOKEN_BYTES = 16 << 10
"""Longest token of a page."""

ID_BYTES = 128
"""Longest name or id of anything, in bytes of UTF-8."""

DIGEST_BYTES = 32
"""Bytes of a digest."""

TENSOR_RANK = 8
"""Most extents of a tensor's shape."""

SINK_OPTIONS = 32
"""Most options of a sink's target."""

SINK_OPTION_BYTES = 1024
"""Longest value of an option, in bytes of UTF-8."""

NAMES = 65536
"""Most names in the store of vectors."""

NAMES_BYTES = 64 * MIB
"""Memory of all names in the store, with their descriptions and sites."""

NAME_DESCRIPTION_BYTES = 1024
"""Longest description of a name, in bytes of UTF-8."""

DERIVED_PROMPTS = 1024
"""Most prompts of each of the two sets of a contrast."""

DERIVED_BYTES = 1024 * MIB
"""Bytes of rows that all contrasts together may hold."""

FIT_CHOICES = 4
"""Most values of an enum that name what a fit of conditions tries."""

FITTED_COMPONENTS = 1024
"""Most prompts of both sets of which principal components are made for conditions. Each takes some
seconds of a core at a site."""

LENS_BYTES = 64 * MIB
"""Most bytes of float32 rows that one lens reads."""

ALL_LENS_BYTES = 512 * MIB
"""Bytes of rows that all lenses together may hold."""

LENS_LOGITS = {"cuda": 1 << 22, "cpu": 1 << 20}
"""Most logits that a call to the workers computes, by device. A step waits for the call, for 10 to
20 ms on a core of a CPU. Fewer if much is read of each row; a single row is always computed."""

LENS_TOP_K = 100
"""Most of the likeliest tokens of each row of a lens."""

LENS_TOKEN_IDS = 64
"""Most tokens whose log-probabilities a lens reads of each row."""

TOKEN_DIRECTIONS = 256
"""Most different directions of tokens in one request."""

KEPT_TOKEN_DIRECTIONS = 1024
"""Directions of tokens that are kept for later requests."""

DIRECTIONS_PER_CALL = 32
"""Most directions of tokens that a call to the workers computes, because a step waits for it."""

UPDATES = 256
"""Most changes of steering, without gains, that can be carried out on a request."""

WAITING_UPDATES = 16
"""Most changes of a request's steering, by its session or by a watch, that may wait for their
answers."""

WAITING_GAINS = 512
"""Most gains of a session, or of a watch for a request, that may wait for their answers. A step
answers all earlier ones."""

WATCH_CHANGES = 256
"""Most changes by watches that a receipt lists. It counts all of them."""

UNREAD_ANSWERS = 1024
"""Most answers to a session's messages that may wait for its client to read them."""

UNREAD_WATCH_ANSWERS = 4096
"""Most answers to the messages of a watch or a subscription that may wait for their client to read
them. They are more than those of a session, because a watch may change hundreds of requests with
every token. An answer takes about 1 KiB. The Python clients have the same limit."""

UNREAD_SECONDS = 600.0
"""Seconds for which a client of Sweep, Lens or ReadRun may leave a message unread. Meanwhile the
call holds runs, memory or one of few places."""

WAITING_REQUESTS = 1024
"""Samples that may wait beside the running samples."""

SUBSCRIPTIONS = 64
"""The most subscriptions that are open or wait for their readers, and the most such watches."""

DEFAULT_SUBSCRIPTIONS = 16
"""Subscriptions of the default buffer size that fit into the server's memory for subscriptions."""

SUBSCRIBE_OPEN_BYTES = 4 * MIB
"""Largest message that opens a subscription."""

SUBSCRIPTION_SELECTOR_BYTES = 256 << 10
"""Most bytes of all selectors of a subscription."""

OBSERVER_COST = 4096
"""Most that a subscription may cost each request that it observes: 1 for each site and each range,
and 8 for each capture. A unit of cost is about a microsecond."""

OBSERVERS_COST = 16384
"""Most that all observers of a request may cost it. If it is exceeded, the costliest observers miss
the request."""

OBSERVER_SPANS = 1024
"""Most spans of positions that a subscription may capture of a request. A subscription with more
misses the request, because each span splits the intervals of the request's own plan."""

WATCH_STEERED_SITES = 256
"""Most sites of all interventions of the rules of a watch, which act on the requests of others."""

OBSERVERS_PLAN_COST = 400
"""The largest sum that the subscriptions which observe a request may add to the cost of its plan,
about 1 for each different combination of captures. The most fragmented subscriptions miss it."""

MISSED_REQUESTS = 1024
"""Most requests that a new subscription reports as missed because they began before it."""

SUBSCRIBED_REQUESTS = 4096
"""Most request ids of a subscription's filter."""

CALL_BYTES = 32 * MIB
"""Most bytes, as float32, in a call to the workers, because a step waits for the call. A single
larger vector is sent alone."""

STATS_SECONDS = 0.25
"""Largest age of the workers' counts in `GetStats`. A call to the workers delays a step, so
newer counts are reused."""

RETRY_SECONDS = 1.0
"""Seconds after which a refused client should try again, if the server knows no better time."""
