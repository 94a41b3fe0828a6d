#!/usr/bin/env bash
# Builds the probe `fused` with the CUDA toolkit alone and runs its variants, each in a process of
# its own with a limit of time; JSON lines go to the folder, a table to the terminal.
#   fused.sh FOLDER
set -u
out=$1
cd "$(dirname "$0")" || exit 1
mkdir -p "$out"
make -s build/fused_yield || exit 1
all="8 16 32 64 128 256 512 1024 2048 4096 8192"

run() { # NAME PROGRAM VARIANT SECONDS TOKENS...
  local name=$1 program=$2 variant=$3 seconds=$4
  shift 4
  timeout "$seconds" "build/$program" "$out/fused_moe_$name.jsonl" "$variant" "$@" \
    > "$out/$name.log" 2>&1
  local status=$?
  [ $status -eq 0 ] || { echo "$name: exit status $status"; tail -n 3 "$out/$name.log" | cut -c 1-300; }
  echo "$name: after $SECONDS s"
}

run fused_small fused tickets 12 8 512
run fused fused_yield tickets 25 $all
run fused_plain fused tickets 20 512 1024 2048 4096 8192
run fused_whole fused_yield whole 25 $all
run gemms fused_yield gemms 20 $all
run fused_static fused_yield static 20 32 256 512 1024 2048 8192
run fused_pairs fused_yield pairs 12 1024 2048
run fused_tanh fused_yield tanh 12 2048 8192
run fused_stages3 fused_yield stages3 16 32 512 2048 8192
nvidia-smi --query-gpu=name,clocks.sm,power.draw --format=csv,noheader
files=
for name in fused fused_plain fused_whole gemms fused_static fused_pairs fused_tanh fused_stages3 fused_small; do
  [ -f "$out/fused_moe_$name.jsonl" ] && files="$files $out/fused_moe_$name.jsonl"
done
python3 fused_table.py $files
