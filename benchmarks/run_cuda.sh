#!/usr/bin/env bash
# Measures the low-latency mode on GPUs of one host and writes what is committed under
# benchmarks/results/:
#
#   cuda_low_latency.jsonl   three geometries at 128 tokens, with the baseline and a matrix product
#                            beside a waiting hook; then the same at 1 to 1024 tokens
#   cuda_low_latency.png     their picture
#
# Use: benchmarks/run_cuda.sh GPUS [folder]   on a machine that does nothing else; some minutes.
#      FANFOLD="python3 -m fanfold.cli.main" benchmarks/run_cuda.sh 4   where there is no .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ranks="${1:?how many GPUs? For example: benchmarks/run_cuda.sh 4}"
results="${2:-benchmarks/results}"
read -ra fanfold <<<"${FANFOLD:-.venv/bin/fanfold}"
mkdir -p "$results"
file="$results/cuda_low_latency.jsonl"

# NCCL's and PyTorch's use of NVLink multicast, which Fanfold does without.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
export TORCH_SYMM_MEM_DISABLE_MULTICAST="${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}"

# hidden top-k experts
geometries=("7168 8 256" "2048 8 512" "1024 22 512")

bench() { # bench TOKENS GEOMETRY OPTIONS...
  local tokens="$1" hidden top_k experts
  read -r hidden top_k experts <<<"$2"
  shift 2
  echo "fanfold bench low-latency --tokens $tokens --hidden $hidden --top-k $top_k" \
    "--experts $experts $*"
  "${fanfold[@]}" bench low-latency --backend cuda --ranks "$ranks" --dtype fp8 \
    --tokens "$tokens" --hidden "$hidden" --top-k "$top_k" --experts "$experts" \
    --json "$file" "$@"
}

for geometry in "${geometries[@]}"; do
  bench 128 "$geometry" --baseline --overlap
done
for tokens in 1 8 32 64 256 512 1024; do
  for geometry in "${geometries[@]}"; do
    bench "$tokens" "$geometry" --iterations 100
  done
done

"${fanfold[@]}" plot "$file" --out "$results/cuda_low_latency.png"
