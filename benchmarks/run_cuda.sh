#!/usr/bin/env bash
# Measures both modes on GPUs of one host and writes what is committed under benchmarks/results/:
#
#   cuda_low_latency.jsonl       three geometries at 128 tokens, with the baseline and a matrix
#                                product beside a waiting hook; then the same at 1 to 1024 tokens
#   cuda_high_throughput.jsonl   hidden 7168 at 4096 and 8192 tokens: fp8 and bf16, both layouts and
#                                in place, cached and new routings, on 12 and 24 SMs, also beside a
#                                matrix product, and against the baseline; more SMs; then five
#                                geometries at 4096 tokens, and hidden 7168 at 512 to 2048
#   cuda_low_latency.png, cuda_high_throughput.png   their pictures
#
# Use: benchmarks/run_cuda.sh GPUS [folder [low_latency|high_throughput]]
#      on a machine that does nothing else; some minutes for the first, half an hour for the second.
#      FANFOLD="python3 -m fanfold.cli.main" benchmarks/run_cuda.sh 4   where there is no .venv
#      STEPS="fp8_4096 geometries" benchmarks/run_cuda.sh 4   of high throughput these only, of
#      fp8_4096 bf16_4096 fp8_8192 bf16_8192 sms geometries tokens
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ranks="${1:?how many GPUs? For example: benchmarks/run_cuda.sh 4}"
results="${2:-benchmarks/results}"
modes="${3:-low_latency high_throughput}"
read -ra fanfold <<<"${FANFOLD:-.venv/bin/fanfold}"
mkdir -p "$results"

# NCCL's and PyTorch's use of NVLink multicast, which Fanfold does without.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
export TORCH_SYMM_MEM_DISABLE_MULTICAST="${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}"

bench() { # bench MODE TOKENS "HIDDEN TOP_K EXPERTS" OPTIONS...
  local mode="$1" tokens="$2" hidden top_k experts
  read -r hidden top_k experts <<<"$3"
  shift 3
  echo "fanfold bench $mode --tokens $tokens --hidden $hidden --top-k $top_k" \
    "--experts $experts $*"
  "${fanfold[@]}" bench "$mode" --backend cuda --ranks "$ranks" \
    --tokens "$tokens" --hidden "$hidden" --top-k "$top_k" --experts "$experts" \
    --json "$results/cuda_${mode/-/_}.jsonl" "$@"
}

low_latency() {
  local geometry tokens geometries=("7168 8 256" "2048 8 512" "1024 22 512")
  for geometry in "${geometries[@]}"; do
    bench low-latency 128 "$geometry" --dtype fp8 --baseline --overlap
  done
  for tokens in 1 8 32 64 256 512 1024; do
    for geometry in "${geometries[@]}"; do
      bench low-latency "$tokens" "$geometry" --dtype fp8 --iterations 100
    done
  done
}

wanted() { # wanted STEP: whether it is among STEPS, or these are not given
  [[ -z "${STEPS:-}" || " $STEPS " == *" $1 "* ]]
}

high_throughput() {
  local geometry tokens dtype
  local main="7168 8 256" kinds=(--layout "token-major,expert-major" --routing "cached,new")
  for tokens in 4096 8192; do
    for dtype in fp8 bf16; do
      wanted "${dtype}_$tokens" || continue
      bench high-throughput "$tokens" "$main" --dtype "$dtype" "${kinds[@]}" --sms 24 \
        --baseline --overlap
      bench high-throughput "$tokens" "$main" --dtype "$dtype" "${kinds[@]}" --sms 12 --overlap
      bench high-throughput "$tokens" "$main" --dtype "$dtype" --layout expert-major --in-place \
        --routing cached,new --sms 12,24 --overlap
    done
  done
  if wanted sms; then
    for dtype in fp8 bf16; do
      bench high-throughput 4096 "$main" --dtype "$dtype" --layout token-major,expert-major \
        --routing cached --sms 8,16,20,32,48
    done
  fi
  if wanted geometries; then
    for geometry in "1024 22 512" "2048 8 512" "4096 8 128" "2880 4 128" "5120 6 160"; do
      for dtype in fp8 bf16; do
        bench high-throughput 4096 "$geometry" --dtype "$dtype" "${kinds[@]}" --sms 24
      done
    done
  fi
  if wanted tokens; then
    for tokens in 512 1024 2048; do
      for dtype in fp8 bf16; do
        bench high-throughput "$tokens" "$main" --dtype "$dtype" "${kinds[@]}" --sms 24
      done
    done
  fi
}

for mode in $modes; do
  case "$mode" in
    low_latency | high_throughput) "$mode" ;;
    *) echo "there is no mode $mode: low_latency or high_throughput" >&2 && exit 2 ;;
  esac
  "${fanfold[@]}" plot "$results/cuda_$mode.jsonl" --out "$results/cuda_$mode.png"
done
