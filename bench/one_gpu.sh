#!/usr/bin/env bash
# Measures the rows of docs/performance.md that concern one GPU, ours and transformers: appends JSON lines to LINES
# (one_gpu.jsonl). Each row is a separate process with a time limit in seconds. A row that fails or takes longer is a line
# {"bench": "failed", ...} with its error, and the next row runs. Name groups or rows to run only those.
#
#   bash bench/one_gpu.sh                                     # everything, an estimated hour on an H200
#   bash bench/one_gpu.sh training decode/llama3.1-8b         # a group, and one row of another
#   bash bench/one_gpu.sh list [decode ...]                   # names, limits and commands
#   python bench/compare.py of one_gpu.jsonl >> one_gpu.jsonl # ratios to the peers
#   python bench/table.py one_gpu.jsonl
#
# Rows use the GPU one after the other, also to compile: XLA times the candidates of its matmuls on it. The next row starts
# before and imports meanwhile (bench/turn.py). Only those of `checks`, which are not timed, run concurrently.
set -uf
cd "$(dirname "$0")/.." || exit
lines=${LINES:-one_gpu.jsonl} gemms=$(realpath "${GEMMS:-gemms_1b.txt}") work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-.95}

# Keys of the default settings: only layers, batch and sequence length.
step="bench/pretrain.py task.steps=10 train.seq_len=4096 train.per_device_batch_size"
long="bench/pretrain.py task.warm_up=1 model=llama3.1-8b model.dtypes.weights=bfloat16 optimizer=adafactor train.per_device_batch_size=1"
tuned="bench/pretrain.py train.seq_len=4096 hardware.compilation_cache=null model.remat.policy=none model.dtypes.logits=bfloat16 task.steps=12"
frugal="bench/pretrain.py train.seq_len=4096 hardware.compilation_cache=null model.dtypes.logits=bfloat16 train.loss_chunk=1024 task.steps=4"
decode="bench/decode.py data=synthetic prompt=64"
server="bench/serve_load.py --random-weights --tokens 128 model=llama3.2-1b data=synthetic task.engine.max_batch=256
  task.engine.cache_tokens=65536 task.engine.max_context=1024 task.queue=4096 task.max_connections=4096 hardware.compilation_cache=$work/server"
train_hf="bench/peers/train_hf.py --device cuda --steps 8 --model"
decode_hf="bench/peers/decode_hf.py --device cuda --prompt 64 --model"

# Name, limit in seconds, command. In the order in which they run.
rows=(
  "training/llama3.2-1b          90 $step=8 model=llama3.2-1b"
  "training/llama3.2-3b         100 $step=8 model=llama3.2-3b"
  "training/llama3.2-3b-fp8     130 $step=8 model=llama3.2-3b quantization=fp8"
  "training/gemma3-4b           120 $step=4 model=gemma3-4b"
  "training/mixtral-8x7b        120 $step=4 model=mixtral-8x7b model.num_layers=3"
  "training/qwen3-30b-a3b-2     150 $step=2 model=qwen3-30b-a3b model.num_layers=8"
  "training/qwen3-30b-a3b-4     150 $step=4 model=qwen3-30b-a3b model.num_layers=8"
  "training/deepseek2-16b       150 $step=4 model=deepseek2-16b model.num_layers=8"
  "training/qwen3-next-80b-a3b  150 $step=2 model=qwen3-next-80b-a3b model.num_layers=4"
  "training/gpt-oss-20b         150 $step=4 model=gpt-oss-20b model.num_layers=6"
  "training/llama3.1-8b-lora    100 $step=4 model=llama3.1-8b adapter=lora"
  "long/32k                     110 $long train.seq_len=32768 task.steps=2"
  "long/131k                    200 $long train.seq_len=131072 task.steps=1"

  "decode/llama3.2-1b-64        150 $decode new=256 model=llama3.2-1b batch=64"
  "decode/llama3.2-1b           150 $decode new=256 model=llama3.2-1b batch=1"
  "decode/llama3.2-1b-int8      150 $decode new=256 model=llama3.2-1b batch=1 quantization=int8_weights"
  "decode/llama3.1-8b           120 $decode new=128 model=llama3.1-8b batch=1"
  "decode/qwen3-30b-a3b         200 $decode new=128 model=qwen3-30b-a3b batch=1,64"
  "decode/qwen3-30b-a3b-int8    200 $decode new=128 model=qwen3-30b-a3b batch=1,64 quantization=int8_weights"
  "decode/qwen3-30b-a3b-int4    200 $decode new=128 model=qwen3-30b-a3b batch=1,64 quantization=int4_weights"
  "decode/gpt-oss-20b           150 $decode new=128 model=gpt-oss-20b batch=1"
  "decode/gpt-oss-20b-int8      150 $decode new=128 model=gpt-oss-20b batch=1 quantization=int8_weights"
  "decode/gpt-oss-20b-int4      150 $decode new=128 model=gpt-oss-20b batch=1 quantization=int4_weights"
  "decode/gpt-oss-20b-mxfp4     150 $decode new=128 model=gpt-oss-20b batch=1 quantization=mxfp4_weights"

  # The first start fills the compilation cache of the others.
  "server/start                 120 $server --clients="
  "server/start-cached           60 $server --clients="
  "server/load                  150 $server --clients=64,256,1024 --seconds 8"
  "rollouts/llama3.2-1b         120 bench/rollouts.py model=llama3.2-1b"
  "speculation/llama3.2-1b      180 bench/speculation.py model=llama3.2-1b batch=1,8,64 prompt=512 new=256 repeats=2"
  "speculation/llama3.2-1b-mtp  180 bench/speculation.py model=llama3.2-1b model.mtp.depth=1 method=mtp batch=1,8 prompt=512 new=256 repeats=2"
  "speculation/llama3.1-8b-1b   180 bench/speculation.py model=llama3.1-8b method=model draft=llama3.2-1b batch=1,8 prompt=512 new=256 repeats=2"
  "grammars/llama3.2-1b         180 bench/structured_output.py cost --rates 0,0.01,0.05 --tokens 480 --repeats 3 model=llama3.2-1b data=synthetic"

  "peers/llama3.2-1b            180 $train_hf llama3.2-1b --batch 4"
  "peers/llama3.2-3b            240 $train_hf llama3.2-3b --batch 4"
  "peers/mixtral-8x7b           200 $train_hf mixtral-8x7b model.num_layers=3 --batch 4 2"
  "peers/qwen3-30b-a3b          200 $train_hf qwen3-30b-a3b model.num_layers=8 --batch 2 1"
  "peers/deepseek2-16b          200 $train_hf deepseek2-16b model.num_layers=8 --batch 4 2"
  "peers/gpt-oss-20b            200 $train_hf gpt-oss-20b model.num_layers=6 --batch 2 1 --attention flex_attention"
  "peers/gpt-oss-20b-eager      150 $train_hf gpt-oss-20b model.num_layers=6 --batch 1 --attention eager --checkpointing"
  "peers/decode-llama3.2-1b     180 $decode_hf llama3.2-1b --batches 1 64 --new 256"
  "peers/decode-qwen3-30b-a3b   240 $decode_hf qwen3-30b-a3b --batches 1 64 --new 128 --repeats 1"
  "peers/decode-gpt-oss-20b     200 $decode_hf gpt-oss-20b --batches 1 --new 128 --repeats 1"

  # Tuned by hand. The GEMM algorithms of the 1B are autotuned first, at the power limit, into GEMMS unless it exists.
  "tuned/gemms                  240 bench/gemm_autotune.py model=llama3.2-1b model.num_layers=2 model.scan_unroll=2 ${tuned#* } train.per_device_batch_size=16 --to $gemms"
  "tuned/llama3.2-1b             90 $tuned model=llama3.2-1b model.scan_unroll=16 train.per_device_batch_size=16"
  "tuned/llama3.2-3b            120 $tuned model=llama3.2-3b model.scan_unroll=28 train.per_device_batch_size=9 train.loss_chunk=1024"
  "tuned/llama3.2-3b-fp8        120 $tuned model=llama3.2-3b model.scan_unroll=28 train.per_device_batch_size=8 train.loss_chunk=2048 quantization=fp8"
  "memory/llama3.2-3b            90 $frugal model=llama3.2-3b model.scan_unroll=28 train.per_device_batch_size=4 model.remat.policy=custom model.remat.save=[query,key,value,context,mlp_gate]"
  "memory/llama3.1-8b            90 $frugal model=llama3.1-8b train.per_device_batch_size=1 model.remat.policy=minimal model.dtypes.weights=bfloat16 optimizer=adafactor"

  "checks/kernels               400 bench/check_kernels.py"
  "checks/losses                400 bench/same_loss.py --together formats=none,fp8 seeds=0,1,2 model=llama3.2-1b model.num_layers=12
    model.emb_dim=1024 model.mlp_dim=4096 model.num_heads=16 model.vocab_size=320 model.scan_unroll=12 data=demo train.steps=500
    train.seq_len=512 train.per_device_batch_size=16 train.log_every=10 train.eval_every=250 train.eval_batches=20
    optimizer.learning_rate=6e-4 optimizer.schedule.warmup_steps=50"
  "kernels/attention            420 bench/kernels.py attention"
  "kernels/others               240 bench/kernels.py delta grouped_matmul int8 norm heads loss"
)

# Append the JSON lines of a command, or one line with the error. GPU_TURN is a file that exists from its turn on, $ahead
# the seconds that it may wait for it.
measure() {
  local name=$1 limit=$2 errors=$work/${1/\//-} code began; shift 2
  timeout -k 5 $((limit + ahead)) python3 "$@" 2> "$errors" | grep --line-buffered '^{' | tee -a "$lines"
  code=${PIPESTATUS[0]}
  if [ "$code" != 0 ]; then
    python3 bench/failed_row.py "$name" "$limit" "$code" "$errors" "$@" | tee -a "$lines"
  fi
  # A row may fail before its turn.
  began=$(stat -c %Y "$GPU_TURN" 2> /dev/null || date +%s)
  echo "== $name: $(($(date +%s) - began)) s: $*" >&2
  tail -n 3 "$errors" | cut -c1-300 >&2
  # A terminated process may hold GPU memory a little longer, and the next would get less.
  if [ "$code" = 124 ] || [ "$code" = 137 ]; then sleep 5; else sleep 1; fi
}

run_row() {
  case $1 in
    tuned/gemms) if [ -s "$gemms" ]; then return; fi ;;
    tuned/llama3.2-1b)
      # Without the file, XLA chooses the algorithms; the output line records the flag.
      if [ -s "$gemms" ]; then local -x XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_load_autotune_results_from=$gemms"; fi ;;
    tuned/llama3.2-3b) local -x XLA_PYTHON_CLIENT_MEM_FRACTION=.97 ;;
    server/start) rm -rf "$work/server" ;;
    checks/*) local -x XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_MEM_FRACTION=.3 ;;
  esac
  measure "$@"
}

# Rows that may start before their turn: their scripts wait for it. The tuned 1B needs the file of the row before.
waits_for_turn() {
  case $1 in tuned/llama3.2-1b) return 1 ;; esac
  case $3 in */pretrain.py | */decode.py | */rollouts.py | */speculation.py | */train_hf.py | */decode_hf.py) return 0 ;; esac
  return 1
}

is_list=
if [ "${1:-}" = list ]; then is_list=1; shift; fi
selected=()
for choice in "${@:-all}"; do
  found=
  for row in "${rows[@]}"; do
    read -rd '' -a words <<< "$row"
    case $choice in all | "${words[0]}" | "${words[0]%%/*}") selected+=("$row"); found=1 ;; esac
  done
  if [ -z "$found" ]; then
    echo "unknown row '$choice'; expected a name of 'bash bench/one_gpu.sh list', or its part before the /" >&2
    exit 2
  fi
done
turn=0 last="" last_limit=0
for row in "${selected[@]}"; do
  read -rd '' -a words <<< "$row"
  if [ -n "$is_list" ]; then echo "${words[*]}"; continue; fi
  turn=$((turn + 1)) ahead=$last_limit
  export GPU_TURN=$work/turn-$turn
  if [[ ${words[0]} == checks/* && $last == checks/* ]]; then
    touch "$GPU_TURN"
  elif ! waits_for_turn "${words[@]}"; then
    wait
    ahead=0
    touch "$GPU_TURN"
  fi
  before=$(jobs -p)
  run_row "${words[@]}" &
  if [ ! -e "$GPU_TURN" ]; then
    # shellcheck disable=SC2086 # one argument for each process
    if [ -n "$before" ]; then wait $before; fi
    touch "$GPU_TURN"
  fi
  last=${words[0]} last_limit=${words[1]}
done
wait
