"""Every span, attribute and phase name that Phasemesh emits, in one place.

GenAI and RPC names are those of OpenTelemetry semantic conventions 1.44; they have been renamed before and
will be again, so nothing else may spell them.
"""

from __future__ import annotations

# Phases: names of spans, of `Timings.phases`, of `Server-Timing` entries and of the `phase` metric label.
PHASE_TOKENIZE = "encode.tokenize"
PHASE_QUEUE = "encode.queue"
PHASE_FORWARD = "encode.forward"
PHASE_POOL = "encode.pool"
PHASE_VALIDATE = "gateway.validate"
PHASE_RPC = "gateway.rpc"
PHASE_RENDER = "gateway.render"
PHASE_PLAN = "search.plan"
PHASE_MERGE = "search.merge"
PHASE_COMMIT = "retrieval.commit"
PHASE_LOAD = "score.load"
PHASE_SCORE_QUEUE = "score.queue"
PHASE_CANDIDATES = "score.candidates"
PHASE_MAXSIM = "score.maxsim"
SEARCH_PHASES = (PHASE_PLAN, PHASE_MERGE)
SCORE_PHASES = (PHASE_LOAD, PHASE_SCORE_QUEUE, PHASE_MAXSIM)
ENCODE_PHASES = (PHASE_TOKENIZE, PHASE_QUEUE, PHASE_FORWARD, PHASE_POOL)
GATEWAY_PHASES = (PHASE_VALIDATE, PHASE_RPC, PHASE_RENDER)

# The batch's own trace.
SPAN_BATCH = "encode.batch"
SPAN_WORKER = "batch.run"
SPAN_WORKER_TRANSFER = "batch.transfer"
SPAN_WORKER_COMPUTE = "batch.compute"
SPAN_WORKER_POOL = "batch.pool"

# Ours.
BATCH_ID = "phasemesh.batch.id"
BATCH_ITEMS = "phasemesh.batch.items"
BATCH_TOKENS = "phasemesh.batch.tokens"
BATCH_PADDED_TOKENS = "phasemesh.batch.padded_tokens"
#: Start-time attribute of batch spans: a batch is sampled if any member is.
BATCH_SAMPLED = "phasemesh.batch.sampled"
BATCH_COUNT = "phasemesh.batch.count"
REPLICA_ID = "phasemesh.replica.id"
DIALECT = "phasemesh.dialect"
MODEL = "phasemesh.model"
ITEMS = "phasemesh.items"
TOKENS = "phasemesh.tokens"
FRAGMENTS = "phasemesh.fragments"
DOCUMENTS = "phasemesh.documents"
PROCESS_PID = "process.pid"
REQUEST_ID = "phasemesh.request_id"

# GenAI (semantic conventions 1.44, Development).
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_DIMENSIONS = "gen_ai.embeddings.dimension.count"
GEN_AI_ENCODING_FORMATS = "gen_ai.request.encoding_formats"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
ERROR_TYPE = "error.type"

# RPC (semantic conventions 1.44, release candidate).
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.response.status_code"

# HTTP (stable).
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
URL_PATH = "url.path"
