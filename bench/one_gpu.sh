#!/usr/bin/env bash
# Everything that docs/performance.md says of one GPU, ours and transformers beside it, in one go: lines of JSON to
# LINES (one_gpu.jsonl). Each measurement is a process of its own, with a limit in seconds after which it is given up;
# about 15 minutes on an H200.
#
#   bash bench/one_gpu.sh && python bench/table.py one_gpu.jsonl
set -u
cd "$(dirname "$0")/.."
lines=${LINES:-one_gpu.jsonl}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-.95}

measure() {
  local limit=$1; shift
  echo "== $*" >&2
  timeout -k 5 "$limit" python3 "$@" 2> >(tail -n 3 >&2) | grep --line-buffered '^{' | tee -a "$lines"
  # A process that was ended may hold the GPU's memory a little longer, and the next would get less.
  sleep 3
}

of_1b=(model=llama3.2-1b model.scan_unroll=16)
of_3b=(model=llama3.2-3b model.scan_unroll=28)
fast=(train.seq_len=4096 hardware.compilation_cache=null model.remat.policy=none model.dtypes.logits=bfloat16)
frugal=(train.seq_len=4096 hardware.compilation_cache=null model.dtypes.logits=bfloat16 train.loss_chunk=1024)
large=(train.per_device_batch_size=8 train.loss_chunk=2048)
decode=(bench/decode.py model=llama3.2-1b data=synthetic prompt=64 new=256)

measure 90 bench/pretrain.py "${of_1b[@]}" "${fast[@]}" train.per_device_batch_size=8
measure 90 bench/pretrain.py "${of_1b[@]}" "${fast[@]}" train.per_device_batch_size=16
measure 90 bench/pretrain.py "${of_3b[@]}" "${fast[@]}" train.per_device_batch_size=4
measure 120 bench/pretrain.py "${of_3b[@]}" "${fast[@]}" "${large[@]}"
measure 120 bench/pretrain.py "${of_3b[@]}" "${fast[@]}" "${large[@]}" quantization=fp8
measure 90 bench/pretrain.py "${of_3b[@]}" "${frugal[@]}" train.per_device_batch_size=4 model.remat.policy=custom \
  'model.remat.save=[query,key,value,context,mlp_gate,mlp_up]'
measure 90 bench/pretrain.py model=llama3.1-8b "${frugal[@]}" train.per_device_batch_size=1 model.remat.policy=minimal \
  model.dtypes.weights=bfloat16 optimizer=adafactor
measure 120 "${decode[@]}" batch=1 warm=25
measure 150 "${decode[@]}" batch=1 warm=60 quantization=int8_weights
measure 120 "${decode[@]}" batch=64 warm=25
measure 180 bench/peers/train_hf.py --model llama3.2-1b --device cuda --batch 8
measure 180 bench/peers/train_hf.py --model llama3.2-3b --device cuda --batch 4
measure 180 bench/peers/decode_hf.py --model llama3.2-1b --device cuda --batches 1 64 --prompt 64 --new 256
measure 180 bench/kernels.py
