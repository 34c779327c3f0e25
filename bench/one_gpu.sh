#!/usr/bin/env bash
# Measures everything in docs/performance.md that concerns one GPU, ours and transformers: JSON lines to LINES
# (one_gpu.jsonl). Each measurement is a separate process with a time limit in seconds. All parts take about 20 minutes on
# an H200; name some to run only those. The GEMM algorithms of the 1B model are autotuned first, at the power limit, into
# GEMMS (gemms_1b.txt), unless that file exists.
#
#   bash bench/one_gpu.sh [prepare] [train | train_1b | train_3b] [float8] [memory] [decode] [peers] [kernels]
#   python bench/table.py one_gpu.jsonl
set -u
cd "$(dirname "$0")/.."
lines=${LINES:-one_gpu.jsonl} gemms=$(realpath "${GEMMS:-gemms_1b.txt}")
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-.95}

measure() {
  local limit=$1 start=$SECONDS; shift
  echo "== $*" >&2
  timeout -k 5 "$limit" python3 "$@" 2> >(tail -n 3 >&2) | grep --line-buffered '^{' | tee -a "$lines"
  echo "== $((SECONDS - start)) s" >&2
  # A terminated process may hold GPU memory a little longer, and the next would get less.
  sleep 3
}

model_1b=(model=llama3.2-1b model.scan_unroll=16)
model_3b=(model=llama3.2-3b model.scan_unroll=28)
fast=(train.seq_len=4096 hardware.compilation_cache=null model.remat.policy=none model.dtypes.logits=bfloat16 task.steps=12)
frugal=(train.seq_len=4096 hardware.compilation_cache=null model.dtypes.logits=bfloat16 train.loss_chunk=1024 task.steps=4)
decode_1b=(bench/decode.py model=llama3.2-1b data=synthetic prompt=64 new=256)

# Everything that is not timed, concurrently: kernel checks, losses with quantization, and decode programs for the
# compilation cache.
prepare() {
  local start=$SECONDS folder; folder=$(mktemp -d)
  echo "== kernel checks, losses, and programs for the compilation cache" >&2
  (
    export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_PYTHON_CLIENT_MEM_FRACTION=.2
    measure 400 bench/check_kernels.py &
    measure 400 bench/same_loss.py --together formats=none,fp8 seeds=0,1,2 model=llama3.2-1b model.num_layers=12 \
      model.emb_dim=1024 model.mlp_dim=4096 model.num_heads=16 model.vocab_size=320 model.scan_unroll=12 data=demo train.steps=500 \
      train.seq_len=512 train.per_device_batch_size=16 train.log_every=10 train.eval_every=250 train.eval_batches=20 \
      optimizer.learning_rate=6e-4 optimizer.schedule.warmup_steps=50 &
    for options in batch=64 batch=1 "batch=1 quantization=int8_weights"; do
      # shellcheck disable=SC2086
      timeout 240 python3 "${decode_1b[@]}" $options repeats=1 > "$folder/${options// /-}" 2>&1 &
    done
    wait
  )
  for log in "$folder"/*; do tail -n 1 "$log" | cut -c1-160 >&2; done
  rm -r "$folder"
  echo "== $((SECONDS - start)) s" >&2
}

train() { train_1b; train_3b; }

train_1b() {
  local batch_16=("${fast[@]}" train.per_device_batch_size=16) flags=${XLA_FLAGS:-}
  [ -s "$gemms" ] ||
    measure 240 bench/gemm_autotune.py model=llama3.2-1b model.num_layers=2 model.scan_unroll=2 "${batch_16[@]}" --to "$gemms"
  # Without the file, XLA chooses the algorithms; the output line records the flag.
  [ -s "$gemms" ] && flags+=" --xla_gpu_load_autotune_results_from=$gemms"
  XLA_FLAGS=$flags measure 90 bench/pretrain.py "${model_1b[@]}" "${batch_16[@]}"
}

train_3b() {
  XLA_PYTHON_CLIENT_MEM_FRACTION=.97 measure 120 bench/pretrain.py "${model_3b[@]}" "${fast[@]}" \
    train.per_device_batch_size=9 train.loss_chunk=1024
}

float8() {
  measure 120 bench/pretrain.py "${model_3b[@]}" "${fast[@]}" train.per_device_batch_size=8 train.loss_chunk=2048 quantization=fp8
}

memory() {
  measure 90 bench/pretrain.py "${model_3b[@]}" "${frugal[@]}" train.per_device_batch_size=4 model.remat.policy=custom \
    'model.remat.save=[query,key,value,context,mlp_gate]'
  measure 90 bench/pretrain.py model=llama3.1-8b "${frugal[@]}" train.per_device_batch_size=1 \
    model.remat.policy=minimal model.dtypes.weights=bfloat16 optimizer=adafactor
}

decode() {
  measure 150 "${decode_1b[@]}" batch=64
  measure 150 "${decode_1b[@]}" batch=1
  measure 150 "${decode_1b[@]}" batch=1 quantization=int8_weights
}

peers() {
  measure 180 bench/peers/train_hf.py --model llama3.2-1b --device cuda --batch 4 --steps 10
  measure 240 bench/peers/train_hf.py --model llama3.2-3b --device cuda --batch 4 --steps 10
  measure 180 bench/peers/decode_hf.py --model llama3.2-1b --device cuda --batches 1 64 --prompt 64 --new 256
  python3 bench/compare.py of "$lines" | tee -a "$lines"
}

kernels() {
  measure 420 bench/kernels.py attention
  measure 240 bench/kernels.py delta grouped_matmul int8 norm heads loss
}

for part in "${@:-all}"; do
  case $part in
    all) prepare; train; float8; memory; decode; peers; kernels ;;
    prepare | train | train_1b | train_3b | float8 | memory | decode | peers | kernels) "$part" ;;
    *) echo "unknown part '$part'; expected prepare, train, train_1b, train_3b, float8, memory, decode, peers or kernels" >&2; exit 2 ;;
  esac
done
