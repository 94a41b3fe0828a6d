#!/usr/bin/env bash
# Builds the probe `fused` with the CUDA toolkit alone and runs its variants, each in a process of
# its own with a limit of time, none after 56 s; JSON lines and logs go to a file each in the folder,
# a table to the terminal.
#   fused.sh FOLDER
set -u
out=$1
cd "$(dirname "$0")" || exit 1
mkdir -p "$out"
make -s build/fused_yield || exit 1
results=$out/fused_moe_fused.jsonl
log=$out/fused.log
all="8 16 32 64 128 256 512 1024 2048 4096 8192"

run() { # PROGRAM VARIANT SECONDS TOKENS...
  local program=$1 variant=$2 seconds=$3
  shift 3
  local left=$((56 - SECONDS))
  if [ $left -le 0 ]; then
    echo "$variant: no time left"
    return
  fi
  [ "$seconds" -gt $left ] && seconds=$left
  timeout "$seconds" "build/$program" "$results" "$variant" "$@" >> "$log" 2>&1
  local status=$?
  [ $status -eq 0 ] || echo "$variant: exit status $status, $(tail -n 1 "$log" | cut -c 1-300)"
  echo "$variant: after $SECONDS s"
}

run fused_yield tickets 20 $all
run fused_yield whole 16 $all
run fused_yield halves 12 512 1024 2048 4096 8192
run fused_yield whole+pairs 8 512 1024 2048
run fused_yield halves+pairs 8 1024 2048 4096
run fused_yield gemms 12 64 512 1024 2048 4096 8192
run fused_yield permuted+unsummed+whole 10 64 1024 2048 4096 8192
run fused_yield permuted 8 1024 8192
run fused_yield unsummed 8 1024 8192
run fused tickets 8 2048 8192
nvidia-smi --query-gpu=name,clocks.sm,power.draw --format=csv,noheader
python3 fused_table.py "$results"
